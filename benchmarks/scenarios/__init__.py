"""What can be measured. A component scenario is one file here; dropping it in is all that is needed."""

from benchmarks.scenarios.base import ComponentScenario, component, component_names

__all__ = ["ComponentScenario", "component", "component_names"]
