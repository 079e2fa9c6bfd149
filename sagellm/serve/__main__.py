from sagellm.serve.command import serve

if __name__ == "__main__":
    serve(prog_name="python -m sagellm.serve")
