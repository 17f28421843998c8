"""Measuring: times (`clocks`), `memory` over time, what ran when (`trace`), what was counted (`counters`)."""
