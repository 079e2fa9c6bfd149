"""Run `sagellm pd`; a signal stops it at once while it loads."""

if __name__ == "__main__":
    from sagellm.core.early import stop_at_once

    stop_at_once()  # before the imports that take time

    from sagellm.pd.command import pd

    pd(prog_name="python -m sagellm.pd")
