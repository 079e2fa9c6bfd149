"""`python -m sagellm.demo_model`."""

from sagellm.demo_model.command import demo_model

if __name__ == "__main__":
    demo_model(prog_name="python -m sagellm.demo_model")
