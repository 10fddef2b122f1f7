"""`hisparse doctor`: can this machine keep KV on the host for its GPU, how fast, and what is to be fixed?"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hisparse.worker.cuda.machine import Finding

EXIT_DONE = 0
EXIT_UNUSABLE = 1


def doctor(
    device: Annotated[int, typer.Option(min=0, metavar="N", help="Which GPU to look at.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> int:
    """Say what this machine offers, measure its link, and name the fix for what is missing.

    Exit code 0 when the GPU can be used, 1 when something that it needs is missing.
    """
    import torch

    from hisparse.errors import InputError
    from hisparse.worker.cuda import machine

    if torch.cuda.is_available() and device >= torch.cuda.device_count():
        raise InputError(f"there is no GPU {device}: this machine has {torch.cuda.device_count()}, counted from 0")
    findings = machine.inspect_machine(device)
    is_usable = all(finding.status is not machine.Status.MISSING for finding in findings)
    if json_output:
        report = {"system": machine.system_name(), "usable": is_usable, "findings": [_as_json(f) for f in findings]}
        print(json.dumps(report, indent=2))
    else:
        print(machine.system_name())
        for line in lines(findings):
            print(line)
        print("the GPU can be used" if is_usable else "the GPU cannot be used: fix what is missing, from the top")
    return EXIT_DONE if is_usable else EXIT_UNUSABLE


def lines(findings: "tuple[Finding, ...]") -> list[str]:
    """One line per finding, and one more for what is to be done about it."""
    width = max(len(finding.name) for finding in findings)
    shown = []
    for finding in findings:
        shown.append(f"{finding.status.value:7}  {finding.name:{width}}  {finding.value}")
        if finding.fix is not None:
            shown.append(f"{'':7}  {'':{width}}  fix: {finding.fix}")
    return shown


def _as_json(finding: "Finding") -> dict[str, Any]:
    return asdict(finding) | {"status": finding.status.value}
