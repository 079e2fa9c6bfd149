"""LMDeploy's own OpenAI server with the modules plugged in: `python -m sagellm.serve`."""

if __name__ == "__main__":  # and not in the processes it starts, which import this file under another name
    from sagellm.core.early import stop_at_once

    stop_at_once()  # before the imports that take time

    from sagellm.serve.command import serve

    serve(prog_name="python -m sagellm.serve")
