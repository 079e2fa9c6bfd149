"""`python -m sagellm.pd proxy` and `up`: as `sagellm pd`, and stopped at once by a signal while it loads."""

if __name__ == "__main__":
    from sagellm.serve.early import stop_at_once

    stop_at_once()  # before the imports that take time

    from sagellm.cli.pd import pd

    pd(prog_name="python -m sagellm.pd")
