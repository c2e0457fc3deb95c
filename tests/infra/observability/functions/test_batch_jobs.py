from typing import Any

import pytest

from infra.observability.functions.batch_jobs import size


@pytest.mark.parametrize(
    ("job", "children"),
    [
        ({}, 0),
        ({"arrayProperties": {"size": 4, "statusSummary": {"RUNNING": 4}}}, 4),
        # Children have an index, parents a size: AWS Batch API reference, ArrayPropertiesDetail
        ({"arrayProperties": {"size": 4, "index": 0}}, 0),
        ({"arrayProperties": {"index": 3}}, 0),
    ],
    ids=["single", "parent", "child with size", "child"],
)
def test_only_parents_of_array_jobs_have_children(job: dict[str, Any], children: int) -> None:
    assert size(job) == children
