"""Which tests `./dev test --changed` runs."""

from support.changed import ALWAYS, own_tests

HUB = ["tests/stages/runs/test_hub.py", "tests/stages/runs/test_hub_bucket.py"]
QUERIES, THIS = "tests/stages/runs/test_queries.py", "tests/test_changed.py"
TESTS = [*HUB, QUERIES, THIS]


def test_a_module_has_the_tests_of_its_name_in_the_mirrored_folder() -> None:
    assert own_tests(["stages/runs/hub.py"], TESTS) == {*ALWAYS, *HUB}


def test_a_changed_test_is_run_and_a_document_has_none() -> None:
    assert own_tests([QUERIES, "README.md"], TESTS) == {*ALWAYS, QUERIES}


def test_a_module_without_tests_of_its_name_has_those_that_import_it() -> None:
    assert own_tests(["support/changed.py"], TESTS) == {*ALWAYS, THIS}
