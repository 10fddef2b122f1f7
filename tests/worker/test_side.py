"""Where computing is synchronous, work beside the forward pass is done when it is launched."""

from hisparse.worker.side import InlineSideStream


def test_tasks_are_done_in_their_order_when_launch_returns() -> None:
    done: list[str] = []
    branches = InlineSideStream().launch([lambda: done.append("first"), lambda: done.append("second")])
    assert done == ["first", "second"]
    assert len(branches) == 2
    for branch in branches:
        branch.join()
        branch.join()
    assert done == ["first", "second"]
