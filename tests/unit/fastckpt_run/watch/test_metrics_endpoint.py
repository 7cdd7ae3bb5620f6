"""The page of metrics: both formats, read by the parsers of Prometheus; tests/e2e/watch has those of a real job."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from fastckpt._core.report.metric_table import METRICS
from fastckpt_run.watch import metrics_endpoint
from fastckpt_run.watch.http_server import Request
from fastckpt_run.watch.metric_values import MetricValues
from fastckpt_run.watch.metrics_endpoint import MetricsEndpoint

ODD = 'a "name"\\with\nall, = {} of it é'


def answer(values: MetricValues, accept: str) -> tuple[str, str]:
    response = MetricsEndpoint(lambda: values).page(Request({}, b"", {"accept": accept} if accept else {}))
    return response.body.decode(), response.kind


@pytest.mark.parametrize(
    ("accept", "read"),
    [
        ("text/plain;version=0.0.4", classic),
        ("application/openmetrics-text; version=1.0.0", openmetrics),
        # These make no sense.
        ("application/openmetrics-text;version=abc", classic),
        ("text/plain;version=.;q=z", classic),
        (";;=,", classic),
    ],
)
def test_odd_names_nan_and_infinity_are_read_back_and_a_page_without_values_has_all_names(accept, read):
    values = MetricValues()
    for number, value in enumerate((float("nan"), float("inf"), -1e300)):
        values.add("user", value, ODD, str(number))
    text, kind = answer(values, accept)
    assert ("openmetrics" in kind) == (read is openmetrics)
    families = {family.name: family for family in read(text)}
    found = {each.labels["rank"]: each for each in families["fastckpt_user"].samples}
    assert {each.labels["name"] for each in found.values()} == {ODD}
    assert str([found[rank].value for rank in "012"]) == "[nan, inf, -1e+300]"
    assert [family.name for family in read(answer(MetricValues(), accept)[0])] == [each.family for each in METRICS]


def test_a_collection_is_written_once_for_all_who_ask():
    values = [MetricValues(), MetricValues()]
    values[0].add("user", 1, ODD, "0")
    endpoint = MetricsEndpoint(lambda: values[0])
    pages = [endpoint.page(Request({}, b"", {})).body for _ in range(2)]
    assert pages[0] is pages[1]
    del values[0]
    assert endpoint.page(Request({}, b"", {})).body != pages[0]
    for number in range(20):  # each a format of its own
        endpoint.page(Request({}, b"", {"accept": f"application/openmetrics-text; version=1.0.{number}"}))
    assert len(endpoint._written) <= metrics_endpoint.MOST
