"""`sdattn app` where gradio is not installed."""

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
