"""The page of metrics: both formats, read by the parsers of Prometheus, through the real server."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from fastckpt._core.report.metric_table import METRICS, Kind, Scope
from fastckpt_run.watch import metrics_endpoint
from fastckpt_run.watch.http_server import Request
from fastckpt_run.watch.metric_values import MetricValues, StepHistogram
from fastckpt_run.watch.metrics_endpoint import MetricsEndpoint

ODD = 'a "name"\\with\nall, = {} of it é'
BOTH = pytest.mark.parametrize(
    ("accept", "read"),
    [
        ("", classic),
        ("text/plain;version=0.0.4", classic),
        ("application/openmetrics-text; version=1.0.0", openmetrics),
    ],
)


def filled(ranks: int = 2) -> MetricValues:
    """Every metric of the table has values."""
    found = MetricValues()
    for number, metric in enumerate(METRICS):
        name = metric.name.removeprefix("fastckpt_")
        if metric.kind is Kind.HISTOGRAM:
            found.add(name, StepHistogram((0.5, 1.0), (3, 2, 1), 7.5))
        else:
            for rank in range(ranks if metric.labels else 1):
                found.add(name, number + rank, *(f"{label} {rank}" for label in metric.labels))
    return found


def answer(values: MetricValues, accept: str) -> tuple[str, str]:
    response = MetricsEndpoint(lambda: values).page(Request({}, b"", {"accept": accept} if accept else {}))
    return response.body.decode(), response.kind


@BOTH
def test_each_value_is_read_back_as_it_was_collected(accept, read):
    text, kind = answer(values := filled(), accept)
    assert ("openmetrics" in kind) == (read is openmetrics)
    families = {family.name: family for family in read(text)}
    for metric in METRICS:
        if metric.kind is not Kind.HISTOGRAM:
            found = {
                tuple(each.labels[name] for name in metric.labels): each for each in families[metric.family].samples
            }
            assert {labels: sample.value for labels, sample in found.items()} == values.series[metric.name]
            assert {sample.name for sample in found.values()} == {metric.name}
    steps = {(each.name, each.labels.get("le")): each.value for each in families["fastckpt_step_seconds"].samples}
    name = "fastckpt_step_seconds"
    buckets = {(f"{name}_bucket", "0.5"): 3, (f"{name}_bucket", "1.0"): 5, (f"{name}_bucket", "+Inf"): 6}
    assert steps == buckets | {(f"{name}_count", None): 6, (f"{name}_sum", None): 7.5}


@BOTH
def test_odd_names_nan_and_infinity_are_read_back_and_a_page_without_values_has_all_names(accept, read):
    values = MetricValues()
    for number, value in enumerate((float("nan"), float("inf"), -1e300)):
        values.add("user", value, ODD, str(number))
    families = {family.name: family for family in read(answer(values, accept)[0])}
    found = {each.labels["rank"]: each for each in families["fastckpt_user"].samples}
    assert {each.labels["name"] for each in found.values()} == {ODD}
    assert str([found[rank].value for rank in "012"]) == "[nan, inf, -1e+300]"
    assert [family.name for family in read(answer(MetricValues(), accept)[0])] == [each.family for each in METRICS]


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=abc", "text/plain;version=.;q=z", ";;=,"])
def test_a_header_that_makes_no_sense_is_answered_in_the_classic_format(accept):
    text, kind = answer(filled(), accept)
    assert kind.startswith("text/plain") and "# TYPE fastckpt_steps_total counter" in text


def test_nodes_after_the_first_have_no_values_of_the_job():
    values = MetricValues(only=Scope.NODE)
    for metric in METRICS:
        if metric.kind is not Kind.HISTOGRAM:
            values.add(metric.name.removeprefix("fastckpt_"), 1, *metric.labels)
    scopes = {metric.scope for metric, _, _ in values}
    assert scopes == {Scope.NODE}
    with pytest.raises(KeyError):
        values.add("no_such_metric", 1)


def test_a_collection_is_written_once_for_all_who_ask(monkeypatch):
    made, registry = [], metrics_endpoint.registry
    monkeypatch.setattr(metrics_endpoint, "registry", lambda values: made.append(1) or registry(values))
    values = [filled()]
    endpoint = MetricsEndpoint(lambda: values[0])
    pages = [endpoint.page(Request({}, b"", {})).body for _ in range(5)]
    assert len(made) == 1 and len(set(pages)) == 1
    values[0] = MetricValues()
    assert endpoint.page(Request({}, b"", {})).body != pages[0] and len(made) == 2
    for number in range(20):  # each a format of its own
        endpoint.page(Request({}, b"", {"accept": f"application/openmetrics-text; version=1.0.{number}"}))
    assert len(endpoint._written) <= metrics_endpoint.MOST
