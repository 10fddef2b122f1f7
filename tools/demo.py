"""Decode four long prompts at once on both tiny models, verified, and ask the finder for facts hidden in long texts.

All texts are sources of Python's standard library: real text that every machine with Python has. The tiny models have
random weights and count one token per byte; at most 15 % of their KV is on the device. The finder is trained: shown are
its answers, and that the KV rows they rest on were fetched from the host. Exits with the first failing run's code.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from hisparse.evaluation.prompts import question

MODELS = ("builtin:tiny-v32", "builtin:tiny-glm")
SOURCES = {"argparse.py": 4020, "tarfile.py": 4070, "inspect.py": 4130, "zipfile.py": 4200}
"""Which files, and how many bytes of each: different lengths, so that the requests do not move in step."""
FALLBACK = {"zipfile.py": "zipfile/__init__.py"}
"""Where newer Pythons keep a file."""
DEVICE_SHARE = "14%"
MAX_TOKENS = 32
FINDER = "builtin:finder"
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
    return [sys.executable, "-m", "hisparse", "eval", FINDER, *options, "--device-kv", FINDER_SHARE, "--json"]


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
    print(f"\nboth models verified in {time.monotonic() - began:.0f} s", flush=True)
    code = ask_finder()
    print(f"\ndemo done in {time.monotonic() - began:.0f} s")
    return code


def ask_finder() -> int:
    """Ask the finder, show what it says, and return the exit code: 1 if an answer is wrong or none came from host."""
    print(
        f"\n{FINDER}: {FINDER_PROMPTS} texts of {FINDER_TOKENS} tokens, {FINDER_SHARE} of their KV on the device. "
        "Each hides four keys and asks for one.",
        flush=True,
    )
    done = subprocess.run(finder_command(), check=False, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        return done.returncode
    report = json.loads(done.stdout)
    (context,) = report["contexts"]
    for answer in context["answers"]:
        print("\n" + story(answer))
    accuracy, tokens = report["accuracy"], "the same tokens" if report["identical"] else "OTHER TOKENS"
    print(f"\n{accuracy['hisparse']:.0%} right from the host, and {tokens} as with all KV on the device;")
    print(f"{accuracy['broken']:.0%} right over a host tier that is broken on purpose")
    return done.returncode or int(accuracy["hisparse"] < 1 or not report["needle_rows"]["from_host"])


def story(answer: dict[str, Any]) -> str:
    """One question in five lines. `answer` is one of the report's `answers`."""
    asked, rows = question(answer["name"]), answer["needle_rows"]
    said, broken = answer["said"]["hisparse"], answer["said"]["broken"]
    lines = {
        f"told at {answer['depth']:.0%}": f"{asked} {answer['answer']}",
        "asked at the end": asked,
        "answer": f"{said}, {'right' if said == answer['answer'] else 'WRONG'}",
        "it rests on": f"{rows['read']} KV rows of the value, {rows['from_host']} of them fetched from host memory",
        "with a broken host": " ".join(broken.split()),
    }
    return "\n".join(f"  {name:<18}  {text}" for name, text in lines.items())


if __name__ == "__main__":
    sys.exit(main())
