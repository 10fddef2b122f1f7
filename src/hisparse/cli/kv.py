"""`hisparse kv`: look into a directory of stored KV, check it, and take things out of it.

Works beside a running engine. No command removes a file that is not a block of ours.
"""

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hisparse.cli.options import named_path
from hisparse.config import parse_size
from hisparse.errors import InputError

if TYPE_CHECKING:
    from hisparse.offload.files.survey import Namespace, Survey, Verdict

EXIT_DONE = 0
EXIT_BAD_BLOCKS = 1
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Directory = Annotated[
    Path,
    typer.Argument(parser=named_path, metavar="DIR", help="A directory of the file tier, or one namespace in it."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]

kv = typer.Typer(name="kv")


@kv.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Stored KV: what is there, is it whole, and what may go."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@kv.command(name="ls")
def list_namespaces(directory: Directory, as_json: AsJson = False) -> int:
    """What is stored: model, layout, blocks, bytes and age, a line for each namespace."""
    from hisparse.offload.files import survey

    surveyed = [(namespace, survey.survey(namespace)) for namespace in survey.find(directory)]
    if as_json:
        print(json.dumps({"namespaces": [_as_json(namespace, found) for namespace, found in surveyed]}, indent=2))
        return EXIT_DONE
    rows: list[tuple[str, ...]] = [("model", "revision", "layout", "blocks", "size", "last used", "bad")]
    rows += [_row(namespace, found) for namespace, found in surveyed]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_DONE


@kv.command(name="stat")
def describe(directory: Directory, as_json: AsJson = False) -> int:
    """All that is known about each namespace: what identifies it, what it holds, and what in it is not ours."""
    from hisparse.offload.files import survey

    described = [_as_json(namespace, survey.survey(namespace)) for namespace in survey.find(directory)]
    if as_json:
        print(json.dumps({"namespaces": described}, indent=2))
        return EXIT_DONE
    for number, fields in enumerate(described):
        if number:
            print()
        for name, value in (*fields.items(), *(fields.pop("identity") or {}).items()):
            if name != "identity":
                print(f"{name:20}  {_value(value)}")
    return EXIT_DONE


@kv.command(name="verify")
def verify(
    directory: Directory,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Set bad files aside.")] = False,
    as_json: AsJson = False,
) -> int:
    """Read every block and check its header and checksum. Exit code 1, and the names, if any is bad."""
    return _verify(directory, moves=quarantine, as_json=as_json)


@kv.command(name="quarantine")
def quarantine(
    directory: Directory,
    show: Annotated[bool, typer.Option("--list", help="Only list what is in quarantine.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Put back what is whole after all.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Remove what is in quarantine.")] = False,
) -> int:
    """Verify like `verify` and set bad files aside; or list, put back or remove what was set aside earlier."""
    from hisparse.offload.files import places, survey
    from hisparse.offload.files.filesystem import LocalFileSystem

    if show + restore + purge > 1:
        raise InputError("--list, --restore and --purge exclude one another")
    if not (show or restore or purge):
        return _verify(directory, moves=True, as_json=False)
    for namespace in survey.find(directory):
        if show:
            for bad in places.quarantined(LocalFileSystem(), namespace.path):
                print(bad.path)
        elif restore:
            num_restored, num_left = survey.restore(namespace)
            print(f"{namespace.name}: {_blocks(num_restored)} put back, {num_left} left in quarantine")
        else:
            num_removed, num_bytes = survey.purge(namespace)
            print(f"{namespace.name}: {_blocks(num_removed)} removed, {_size(num_bytes)}{_left_behind(namespace)}")
    return EXIT_DONE


def _left_behind(namespace: "Namespace") -> str:
    """What a purge did not remove, and why, for the end of its line."""
    from hisparse.offload.files.places import QUARANTINE

    folder = Path(namespace.path) / QUARANTINE
    try:
        num_left = len(list(folder.iterdir()))
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"; {folder}: {error.strerror}"
    if not num_left:
        return ""
    files = "1 file" if num_left == 1 else f"{num_left} files"
    return f"; {files} left, which are no blocks of ours by name or by how they begin: look into {folder}"


@kv.command(name="prune")
def prune(
    directory: Directory,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove what was used longest ago until this much is left.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was last used longer ago: 90m, 12h, 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> int:
    """Remove blocks by size or age, and what ended processes left behind."""
    from hisparse.offload.files import survey

    if max_bytes is None and older_than is None:
        raise InputError("prune needs --max-bytes or --older-than")
    limits = survey.PruneLimits(
        None if max_bytes is None else parse_size(max_bytes, "--max-bytes"),
        None if older_than is None else time.time() - parse_age(older_than),
    )
    num_blocks, num_bytes = survey.prune(survey.find(directory), limits, dry_run=dry_run)
    print(f"{_blocks(num_blocks)} {'would be ' if dry_run else ''}removed, {_size(num_bytes)}")
    return EXIT_DONE


@kv.command(name="convert")
def convert(
    directory: Directory,
    out: Annotated[
        Path, typer.Argument(parser=named_path, metavar="OUT", help="Where the converted blocks go; may be DIR.")
    ],
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="packed-nhd, packed-hnd, split-nhd, split-hnd or latent. [default: as it is]"
        ),
    ] = None,
) -> int:
    """Make canonical blocks of a family out of what DIR stores, direct layouts included. DIR itself is only read.

    Exit code 1 if a namespace or a block could not be converted.
    """
    from hisparse.cli.progress import BlockProgress, on_terminal
    from hisparse.offload.files import conversion, survey

    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is no directory: name one for the converted blocks, which may be {directory} itself")
    is_complete, is_idle = True, True
    for job in conversion.plan_jobs(survey.find(directory), family):
        name = job.sources[0].name
        if job.conversion is None:
            print(f"{name}: not converted: {job.problem}")
            is_complete = is_complete and job.is_done
            continue
        is_idle = False
        num_done, failed = 0, []
        with BlockProgress("convert", len(job.keys()), on_terminal()) as progress:
            for converted in conversion.run_job(job, out):
                progress.advance()
                if converted.problem is None:
                    num_done += 1
                else:
                    failed.append(converted)
        for converted in failed:
            print(f"{converted.key.hex()}: not converted: {converted.problem}")
        print(f"{name}: {_blocks(num_done)} converted to {job.conversion.target.name}")
        is_complete = is_complete and not failed
    if is_idle and is_complete:
        print(f"nothing to do: nothing was written to {out}")
    return EXIT_DONE if is_complete else EXIT_BAD_BLOCKS


def parse_age(text: str) -> float:
    """Seconds of an age such as "90m", "12h" or "7d". Raises `InputError`."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--older-than {text!r} is no age: write it like 90m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _verify(directory: Path, *, moves: bool, as_json: bool) -> int:
    from hisparse.cli.progress import BlockProgress, on_terminal
    from hisparse.offload.files import survey

    namespaces = survey.find(directory)
    unreadable = [namespace for namespace in namespaces if namespace.identity is None]
    num_blocks = sum(survey.survey(namespace).num_blocks for namespace in namespaces)
    num_checked, bad = 0, []
    with BlockProgress("verify", num_blocks, on_terminal()) as progress:
        for namespace in namespaces:
            for verdict in survey.verify(namespace) if namespace.identity else ():
                progress.advance()
                num_checked += 1
                if verdict.problem is not None:
                    is_moved = moves and survey.quarantine(namespace, verdict)
                    bad.append((verdict, is_moved))
    if as_json:
        print(
            json.dumps(
                {
                    "blocks": num_checked,
                    "bad": [_bad_as_json(verdict, is_moved) for verdict, is_moved in bad],
                    "unreadable": {namespace.path: namespace.problem for namespace in unreadable},
                },
                indent=2,
            )
        )
    else:
        for verdict, is_moved in bad:
            print(f"{verdict.path}: {verdict.problem}{' (set aside)' if is_moved else ''}")
        for namespace in unreadable:
            print(f"{namespace.path}: not verified: {namespace.problem}")
        print(f"{_blocks(num_checked)} verified, {len(bad)} bad")
    return EXIT_BAD_BLOCKS if bad or unreadable else EXIT_DONE


def _bad_as_json(verdict: "Verdict", is_moved: bool) -> dict[str, Any]:
    fault = verdict.fault.value if verdict.fault else "unreadable"
    return {"path": verdict.path, "fault": fault, "problem": verdict.problem, "quarantined": is_moved}


def _as_json(namespace: "Namespace", found: "Survey") -> dict[str, Any]:
    identity = namespace.identity
    return {
        "path": namespace.path,
        "problem": namespace.problem,
        "blocks": found.num_blocks,
        "bytes": found.block_bytes,
        "oldest_use_s": found.oldest_s,
        "newest_use_s": found.newest_s,
        "quarantined": found.num_quarantined,
        "quarantined_bytes": found.quarantined_bytes,
        "foreign_files": found.num_foreign,
        "identity": None if identity is None else json.loads(identity.to_json()),
    }


def _row(namespace: "Namespace", found: "Survey") -> tuple[str, ...]:
    identity = namespace.identity
    if identity is None:
        words = (namespace.name, "", f"unreadable: {namespace.problem}")
    else:
        topology = identity.topology
        words = (identity.model, identity.revision, f"v{identity.format}-{identity.family}")
        words = (*words[:2], words[2] + (f" direct tp {topology.tp}" if topology else ""))
    return (
        *(_clean(word) for word in words),
        str(found.num_blocks),
        _size(found.block_bytes),
        "" if found.newest_s is None or found.oldest_s is None else _ages(found.newest_s, found.oldest_s),
        str(found.num_quarantined) if found.num_quarantined else "",
    )


def _ages(newest_s: float, oldest_s: float) -> str:
    newest, oldest = _age(newest_s), _age(oldest_s)
    return f"{newest} ago" if newest == oldest else f"{newest} to {oldest} ago"


def _age(used_s: float) -> str:
    """The largest unit of which there are two."""
    age = max(0.0, time.time() - used_s)
    unit = next((unit for unit in "dhm" if age >= 2 * _SECONDS[unit]), "s")
    return f"{age / _SECONDS[unit]:.0f}{unit}"


def _blocks(number: int) -> str:
    return f"{number} block{'' if number == 1 else 's'}"


def _size(num_bytes: int) -> str:
    from hisparse.cli.render import format_bytes

    return format_bytes(num_bytes)


def _clean(text: str) -> str:
    from hisparse.cli.render import visible

    return visible(text).replace("\n", " ")


def _value(value: Any) -> str:
    return "-" if value is None else _clean(value if isinstance(value, str) else json.dumps(value))
