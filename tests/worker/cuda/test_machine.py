"""What the doctor finds, on machines that are made up of files."""

from pathlib import Path

import pytest

from hisparse.kernels import attention_libraries
from hisparse.worker.cuda import machine, numa
from hisparse.worker.cuda.machine import Link, Status

BUS_ID = "0000:1B:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two NUMA nodes, and a GPU on the second one with sixteen lanes of generation 5."""
    for node in (0, 1):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    gpu = tmp_path / "bus/pci/devices" / BUS_ID.lower()
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    (gpu / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (gpu / "current_link_width").write_text("16\n")
    return tmp_path


def test_nodes_and_the_gpu_s_own(sysfs: Path) -> None:
    assert numa.nodes(sysfs) == (0, 1)
    assert numa.node_of_device(BUS_ID, sysfs) == 1
    found = machine.find_numa(BUS_ID, sysfs)
    assert (found.status, found.fix) == (Status.OK, None)
    assert "node 1" in found.value


@pytest.mark.parametrize("content", ["-1\n", "x\n", None])
def test_a_gpu_whose_node_is_not_known_is_advice(sysfs: Path, content: str | None) -> None:
    file = sysfs / "bus/pci/devices" / BUS_ID.lower() / "numa_node"
    file.unlink() if content is None else file.write_text(content)
    assert machine.find_numa(BUS_ID, sysfs).status is Status.ADVICE


def test_a_machine_without_nodes_has_one(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == ()
    assert machine.find_numa(BUS_ID, tmp_path).value == "one node"


def test_the_link_s_generation_and_width(sysfs: Path) -> None:
    link = machine.read_link(BUS_ID, sysfs)
    assert link == Link("32.0", 16)
    assert machine.find_link(link).value == "generation 5 x16"
    assert link.gbps == pytest.approx(63.0, abs=0.1)


@pytest.mark.parametrize("file", ["max_link_speed", "current_link_width"])
def test_a_link_that_the_system_hides_is_no_fault(sysfs: Path, file: str) -> None:
    path = sysfs / "bus/pci/devices" / BUS_ID.lower() / file
    path.write_text("Unknown")
    assert machine.find_link(machine.read_link(BUS_ID, sysfs)).status is Status.OK


def test_few_lanes_are_advice() -> None:
    found = machine.find_link(Link("16.0", 8))
    assert found.status is Status.ADVICE
    assert "16 lanes" in str(found.fix)


@pytest.mark.parametrize(("rate", "status"), [(55.0, Status.OK), (30.0, Status.ADVICE)])
def test_a_rate_far_below_the_link_is_advice(rate: float, status: Status) -> None:
    found = machine.judge_bandwidth(rate, 55.0, Link("32.0", 16))
    assert found.status is status
    assert found.numbers == {"to_device_gbps": rate, "to_host_gbps": 55.0}


def test_a_rate_over_an_unknown_link_is_only_reported() -> None:
    assert machine.judge_bandwidth(3.0, 3.0, None).status is Status.OK


def test_a_limit_of_locked_memory_is_advice_and_none_is_fine() -> None:
    assert machine.find_memlock(65536).status is Status.ADVICE
    assert machine.find_memlock(-1).value == "unlimited"


def test_a_library_that_would_make_attention_faster_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_libraries, "flashmla_missing", lambda: "the package was not found")
    found = machine.find_attention((9, 0))
    assert (found.name, found.status) == ("attention", Status.ADVICE)
    assert found.fix is not None
    assert "flash-mla" in found.fix
    assert machine.find_attention((8, 0)).status is Status.OK


def test_memory_prefers_a_node_that_exists_and_none_that_does_not() -> None:
    import mmap

    from hisparse.worker.host_memory import AnonymousMapping

    mapping = AnonymousMapping(mmap.PAGESIZE)
    assert not numa.prefer_node(mapping.storage.data_ptr(), mmap.PAGESIZE, 900)
    mapping.release()
