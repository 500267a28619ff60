"""`sdattn app`: what is refused before a model is loaded."""

import socket
import subprocess
import sys

PROGRAM = """
import sys
sys.modules["gradio"] = None  # as if it were not installed
sys.argv = ["sdattn", "app", "--model", "/no/such/folder"]
from sdattn.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def test_a_missing_gradio_is_named_before_the_model_is_loaded():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'sdattn[app]'" in done.stderr
    assert done.stdout == "False\n"


def test_a_taken_port_is_told_as_it_is_typed_before_the_model_is_loaded(invoke):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, out, err = invoke("app", "--port", port, "--model", "/no/such/folder")
    assert (code, out) == (2, "")
    assert f"--port {port}: another program listens there" in err and "folder" not in err
    code, _, err = invoke("app", "--host", "198.51.100.7", "--model", "/no/such/folder")
    assert code == 2 and "--host 198.51.100.7: it is no address of this machine" in err
