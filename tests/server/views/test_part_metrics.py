"""What each device does of layers that several share, as series."""

from prometheus_client import CollectorRegistry, generate_latest

from expertd_server.engine.joined import PartTimes
from expertd_server.views.part_metrics import PartMetrics


def test_each_scrape_reads_calls_routes_and_seconds_by_device():
    times, registry = [PartTimes(2, 30, 1_500_000_000), PartTimes(0, 0, 0)], CollectorRegistry()
    registry.register(PartMetrics(["cuda:0", "cpu"], lambda: times))
    text = generate_latest(registry).decode()
    assert 'expertd_part_calls_total{device="cuda:0"} 2.0' in text
    assert 'expertd_part_routes_total{device="cuda:0"} 30.0' in text
    assert 'expertd_part_seconds_total{device="cuda:0"} 1.5' in text
    times[1] = PartTimes(1, 5, 1)
    assert 'expertd_part_routes_total{device="cpu"} 5.0' in generate_latest(registry).decode()
