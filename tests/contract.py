"""Reports of contract suites, as their tests read them."""

from collections.abc import Collection, Iterable

from sagellm.core.contract import ContractReport


def broken(report: ContractReport) -> dict[str, str]:
    """Return the message of each rule that was seen to be broken."""
    return {result.rule: result.message for result in report.results if result.seen and not result.passed}


def check_kept(report: ContractReport, rules: Iterable[str]) -> None:
    """Expect that each of these rules, and no other, was seen and kept."""
    assert [result for result in report.results if not result.passed] == []
    assert [result.rule for result in report.results] == list(rules)


def check_caught(report: ContractReport, rule: str, follows: Collection[str] = (), where: str = "[scenario ") -> None:
    """Expect that a rule was broken, and of the others at most those that follow."""
    found = broken(report)
    assert rule in found and not report.passed, found
    assert set(found) <= {rule, *follows}, found
    assert where in found[rule] and "seed " in found[rule]


def check_unbuilt(report: ContractReport, what: str) -> None:
    """Expect that nothing passed, because no object could be built."""
    assert not any(result.passed for result in report.results)
    assert list(broken(report)) == ["builds"]
    assert {result.message for result in report.results if not result.seen} == {f"not checked: the {what} could not be built."}
