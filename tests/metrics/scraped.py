"""What a scrape says, parsed as Prometheus parses it."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

Values = dict[tuple[str, ...], float]


class Scrape:
    """Samples by name: `scrape["hisparse_slab_bytes"]` is a value for each combination of labels, by label name."""

    def __init__(self, text: str) -> None:
        self.samples: list[Sample] = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def __getitem__(self, name: str) -> Values:
        return {tuple(sample.labels.values()): sample.value for sample in self.samples if sample.name == name}

    def __iter__(self) -> Iterator[str]:
        return iter({sample.name for sample in self.samples})

    def one(self, name: str) -> float:
        """The value of a metric without labels."""
        return self[name][()]


def scrape(registry: CollectorRegistry) -> Scrape:
    """Ask a registry as a server does."""
    return Scrape(generate_latest(registry).decode("utf-8"))
