"""Every check of `kvpool doctor` fails where it should, names its fix, and says nothing bad of a good host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.doctor import good
from tests.unit.doctor.rule_cases import CASES
from tests.unit.doctor.version_cases import PULL

from kvpool.ops.doctor.catalogue import CATALOGUE
from kvpool.ops.doctor.facts.ssd import Ssd
from kvpool.ops.doctor.finding import Level
from kvpool.ops.doctor.measuring import Measured
from kvpool.ops.doctor.need import Need, memory_amounts, page_needs, shared_memory_amounts
from kvpool.ops.doctor.rules import (
    container,
    environment,
    files,
    lease,
    measure,
    memory,
    npu_tools,
    ports,
    ssd,
    versions,
)
from kvpool.ops.doctor.rules import (
    huge_pages as huge_page_rules,
)
from kvpool.options.prefill_decode import PullOptions


def named(findings, check):
    return [finding for finding in findings if (finding.area, finding.check) == (check.area, check.name)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.check.area}: {case.check.name}: {case.found}" for case in CASES])
def test_each_rule(case):
    wrong = [finding for finding in named(case.wrong, case.check) if finding.level is not Level.OK]
    assert [finding.level for finding in wrong if case.found in finding.found][:1] == [case.level], case.wrong
    assert any(case.fix in finding.fix for finding in wrong), wrong
    assert {finding.level for finding in named(case.right, case.check)} <= {Level.OK}


def test_every_check_has_a_case_that_makes_it_speak():
    spoken = {(case.check.area, case.check.name) for case in CASES}
    assert spoken == {(check.area, check.name) for check in CATALOGUE}
    assert len(CATALOGUE) == len(set(CATALOGUE))


def test_every_finding_but_a_good_one_names_a_fix_and_belongs_to_the_catalogue():
    known = {(check.area, check.name) for check in CATALOGUE}
    for case in CASES:
        for finding in case.wrong + case.right:
            assert (finding.area, finding.check) in known
            assert bool(finding.fix) == (finding.level is not Level.OK), finding
            assert finding.found


def judged(need: Need):
    return [
        *versions.judge_versions(installed_for(need), need),
        *environment.judge_environment(good.FILES, good.PORTS, need),
        *files.judge_files(good.FILES, need),
        *container.judge_container(good.CONTAINER, need),
        *memory.judge_memory(good.MEMORY, need),
        *huge_page_rules.judge_huge_pages(good.PAGES, good.RUNS, need),
        *ssd.judge_ssd(Ssd(), need),
        *ports.judge_ports(good.PORTS, need),
        *npu_tools.judge_npu_tools(good.TOOLS, need),
        *lease.judge_lease(None, need),
        *measure.judge_measure(Measured(5.0, 5.0), need),
    ]


def installed_for(need):
    return good.VERSIONS if need.npu else replace(good.VERSIONS, mooncake=(("mooncake-transfer-engine-non-cuda", "0.3.13"),))


@pytest.mark.parametrize("need", good.EVERY, ids=[f"{need.series} {need.backend}" for need in good.EVERY])
def test_a_good_host_is_good(need):
    bad = [finding for finding in judged(need) if finding.level is not Level.OK]
    assert [(finding.area, finding.check) for finding in bad] == (
        [("npu tools", "operator signatures")] if need is good.A5_MEMCACHE else []
    )


def test_amounts_add_up():
    assert [amount.nbytes >> 30 for amount in memory_amounts(good.LOCAL)] == [8, 4]
    assert [amount.nbytes >> 30 for amount in shared_memory_amounts(good.LOCAL)] == [8]
    assert sum(amount.nbytes for amount in memory_amounts(good.A2)) == 21 << 30  # segment and buffer
    assert memory_amounts(good.A3_YUANRONG) == []  # it lies in huge pages
    assert [pages.number for pages in page_needs(good.A3_YUANRONG)] == [20480]


def test_a_transfer_buffer_counts_on_the_prefill_side_of_one_host_only():
    sides = {"prefill": {"tp_size": 1, "dp_size": 1}, "decode": {"tp_size": 1, "dp_size": 1}}
    near = replace(good.LOCAL, pull=PullOptions.model_validate(sides))
    assert [amount.nbytes >> 30 for amount in shared_memory_amounts(near)] == [8, 2]
    assert len(shared_memory_amounts(replace(near, role="decode"))) == 1
    far = PullOptions.model_validate({**sides, "transfer_host": "10.0.0.1"})
    assert len(shared_memory_amounts(replace(near, pull=far))) == 1


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("8.3.RC2", "8.5.0"),
        ("8.5.RC1", "8.5.0"),
        ("9.0.0", "9.0.1"),
        ("25.5.rc1", "25.5"),
        ("0.3.11", "0.3.11.post1"),
        ("1.9", "1.10"),
    ],
)
def test_versions_compare(older, newer):
    assert versions.at_least(newer, older)
    assert versions.at_least(older, older)
    assert versions.at_least(older, newer) is False
    assert versions.at_least(None, newer) is None
    assert versions.at_least("main", newer) is None


OLD_MOONCAKE = (("mooncake-transfer-engine-npu", "0.3.10"),)


@pytest.mark.parametrize(
    ("need", "check", "changes", "lowest"),
    [
        (good.A3, versions.HDK, {"mooncake": OLD_MOONCAKE}, "26.0"),
        (good.A3, versions.HDK, {}, "25.5"),
        (good.A3_MEMCACHE, versions.HDK, {}, "26.0"),
        (replace(good.A3_YUANRONG, pull=PULL), versions.HDK, {}, "25.5"),
        (good.A5_MEMCACHE, versions.HDK, {"mooncake": OLD_MOONCAKE}, "25.6"),
        (good.A3_LAYERWISE, versions.DRIVER, {}, "25.5.1"),
        (good.A3_LAYERWISE, versions.MEMFABRIC, {}, "1.2"),
        (good.A3_REMOTE_D2H, versions.DRIVER, {}, "25.5.1"),
        (good.A3, versions.CANN, {}, "9.0.0"),
        (good.A3_YUANRONG, versions.CANN, {}, "8.5.0"),
    ],
)
def test_each_section_of_the_guides_asks_for_its_own_versions(need, check, changes, lowest):
    facts = replace(good.VERSIONS, **changes)
    (finding,) = named(versions.judge_versions(facts, need), check)
    assert finding.needed == f">= {lowest}"


@pytest.mark.parametrize(
    ("need", "check"),
    [
        (good.A3_YUANRONG, versions.HDK),
        (good.A3_YUANRONG, versions.LINGQU),
        (good.A3_LAYERWISE, versions.HDK),
        (good.A3_REMOTE_D2H, versions.HDK),
        (good.A3_MEMCACHE, versions.DRIVER),
        (good.A3, versions.MEMFABRIC),
    ],
)
def test_what_no_section_asks_for_is_not_asked(need, check):
    assert not named(versions.judge_versions(replace(good.VERSIONS, npu_driver="1.0"), need), check)


def test_memcache_without_layers_does_with_any_memfabric():
    (finding,) = named(versions.judge_versions(replace(good.VERSIONS, memfabric="1.0.0"), good.A3_MEMCACHE), versions.MEMFABRIC)
    assert finding.level is Level.OK


@pytest.mark.parametrize(
    ("value", "level"),
    [("eth", "ok"), ("=eth", "failure"), ("=ib0,eth0", "ok"), ("^docker", "ok"), ("^eth", "failure"), ("^=eth", "ok"), ("^", "ok")],
)
def test_how_hccl_selects_an_interface(value, level):
    need = replace(good.A2, env={**good.A2.env, "HCCL_SOCKET_IFNAME": value})
    found = environment.judge_environment(good.FILES, good.PORTS, need)
    assert [one.level.value for one in named(found, environment.INTERFACES) if one.found.startswith("HCCL")] == [level]
