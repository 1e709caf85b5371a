"""A run of minutes says how long it takes."""

from transformers import TrainerState

from st_magnitude.training import stopping


def test_the_time_left_is_told_once(monkeypatch):
    said = []
    left = stopping._TimeLeft(said.append)
    clock = iter([0.0, 60.0])
    monkeypatch.setattr(stopping.time, "perf_counter", lambda: next(clock))
    state = TrainerState(max_steps=806, global_step=6, is_world_process_zero=True)
    for _ in range(9):
        left.on_step_end(None, state, None)
    assert said == ["Training: 806 steps, about 160 min left."]
