"""Decode four long prompts at once on both tiny models, with at most 15 % of their KV on the device, verified.

The prompts are sources of Python's standard library: real text that every machine with Python has. Each tiny model
counts one token per byte. Where the finder is installed, it is then asked for facts hidden in such text, and shown is
whether the rows that its answers rest on were fetched from the host. Exits with the first failing run's code.
"""

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from hisparse.engine.builtin import FINDER, has_finder

MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
SOURCES = {"argparse.py": 4020, "tarfile.py": 4070, "inspect.py": 4130, "zipfile.py": 4200}
"""Which files, and how many bytes of each: different lengths, so that the requests do not move in step."""
FALLBACK = {"zipfile.py": "zipfile/__init__.py"}
"""Where newer Pythons keep a file."""
DEVICE_SHARE = "14%"
MAX_TOKENS = 32
FINDER_SHARE = "10%"
FINDER_TOKENS = 4096
FINDER_PROMPTS = 4


def write_prompts(folder: Path) -> list[Path]:
    """Cut the sources to size and write them below `folder`. The bytes are ASCII, so one byte is one character."""
    library = Path(sysconfig.get_path("stdlib"))
    prompts = []
    for name, num_bytes in SOURCES.items():
        source = library / name
        if not source.is_file():
            source = library / FALLBACK[name]
        text = source.read_bytes().decode("ascii", errors="ignore")[:num_bytes]
        if len(text) < num_bytes:
            raise SystemExit(f"{source} has only {len(text)} characters; the demo wants {num_bytes}")
        prompts.append(folder / name)
        prompts[-1].write_text(text, encoding="ascii")
    return prompts


def command(model: str, prompts: list[Path]) -> list[str]:
    """The `hisparse generate` command line of one model."""
    options = ["--max-tokens", str(MAX_TOKENS), "--ignore-eos", "--device-kv", DEVICE_SHARE, "--verify"]
    files = [argument for prompt in prompts for argument in ("--prompt-file", str(prompt))]
    return [sys.executable, "-m", "hisparse", "generate", model, *files, *options]


def finder_command() -> list[str]:
    """The `hisparse eval` command line of the finder."""
    options = ["--context", str(FINDER_TOKENS), "--keys", "4", "--prompts", str(FINDER_PROMPTS)]
    return [sys.executable, "-m", "hisparse", "eval", FINDER, *options, "--device-kv", FINDER_SHARE]


def main() -> int:
    """Run all models and return the first exit code that is not 0."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hisparse-demo-") as folder:
        prompts = write_prompts(Path(folder))
        for model in MODELS:
            arguments = command(model, prompts)
            names = " ".join(f"{prompt.name}[:{prompt.stat().st_size}]" for prompt in prompts)
            print(f"\n{model}: {names}, {DEVICE_SHARE} of the KV on the device", flush=True)
            code = subprocess.run(arguments, check=False).returncode
            if code:
                return code
    print(f"\nboth models verified in {time.monotonic() - began:.0f} s")
    return ask_finder() if has_finder() else 0


def ask_finder() -> int:
    """Ask the finder, and return the exit code."""
    print(f"\n{FINDER}: {FINDER_PROMPTS} texts of {FINDER_TOKENS} tokens, {FINDER_SHARE} of their KV on the device")
    print(
        "each hides four lines such as `# the key of lantern is 48213` and ends with `# the key of lantern is`",
        flush=True,
    )
    return subprocess.run(finder_command(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
