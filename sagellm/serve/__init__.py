"""LMDeploy's own OpenAI server with the modules plugged in: `python -m sagellm.serve`."""
