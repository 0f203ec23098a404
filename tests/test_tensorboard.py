"""Event files as TensorBoard itself reads them: each step once, and one point per run."""

import math

import pytest

from mismatch_sim.config import RunConfig
from mismatch_sim.errors import RunError
from mismatch_sim.runlog import RunFolder
from mismatch_sim.tensorboard_log import RunWriter, final_metrics, hparams

RESULT = {
    "dose": {"value": 0.25, "low": 0.2, "high": 0.3},
    "quality": {"value": 0.75, "low": 0.7, "high": 0.8},
    "kl_exact_mean": 0.5,
    "kl_exact_last": None,
    "clean": {"quality": {"value": 1.0}},
    "steps": 6,
}


def events(folder):
    """TensorBoard's view of one folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def points(folder, tag):
    return [(e.step, e.value) for e in events(folder).Scalars(tag)]


def run(path, config, begin=RunFolder.create, stop=None, steps=6, replayed=0):
    """As the command does it: a writer around a loop that logs, then writes."""
    template = {"n": 0}
    with begin(path, config.to_json(), "h", {}) as folder, RunWriter(path, config) as board:
        start = (folder.restore(template) or (None, 0))[1]
        assert start == replayed
        for step in range(start, steps):
            if step == stop:
                return
            line = {"mismatch/kl_exact": step / 4, "mismatch/kl_by_position": [1.0], "bare": 1}
            line["rollout_corr/kl"] = math.inf if step == 1 else -1.0
            folder.log_step(step, line)
            folder.log_time(step, {"time/total": 2.0})
            board.write(step, {**line, "time/total": 2.0})
            if (step + 1) % 2 == 0:
                folder.checkpoint({"n": step}, step + 1)
        folder.checkpoint({"n": steps}, steps)
        board.finish(RESULT)
        folder.finish(RESULT)


def test_every_scalar_of_every_step_is_a_curve(tmp_path):
    run(tmp_path / "a", RunConfig())
    assert sorted(events(tmp_path / "a").Tags()["scalars"]) == [
        "mismatch/kl_exact",
        "rollout_corr/kl",
        "time/total",
    ]
    assert points(tmp_path / "a", "mismatch/kl_exact") == [(s, s / 4) for s in range(6)]
    assert points(tmp_path / "a", "rollout_corr/kl")[:2] == [(0, -1.0), (1, math.inf)]


@pytest.mark.parametrize("stop", [0, 3, 5])
def test_a_resumed_run_shows_no_step_twice(stop, tmp_path):
    config = RunConfig(staleness=2)
    run(tmp_path / "a", config, stop=stop)
    (tmp_path / "a" / "events.out.tfevents.1.other").touch()  # somebody else's stays
    with open(tmp_path / "a" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 9, "cut')
    run(tmp_path / "a", config, RunFolder.open, replayed=stop // 2 * 2)
    (tmp_path / "a" / "events.out.tfevents.1.other").unlink()
    for tag, value in (("mismatch/kl_exact", 0.25), ("time/total", None)):
        assert points(tmp_path / "a", tag) == [(s, s * value if value else 2.0) for s in range(6)]
    assert len(list(tmp_path.rglob("*tfevents*"))) == 2
    run(tmp_path / "a", config, RunFolder.open, replayed=6)  # finished: rebuilt from the logs alone
    assert points(tmp_path / "a", "mismatch/kl_exact") == [(s, s / 4) for s in range(6)]
    assert points(tmp_path / "a" / "hparams", "final/dose") == [(6, 0.25)]


def test_replayed_points_keep_their_time(tmp_path):
    run(tmp_path / "a", RunConfig())
    before = [e.wall_time for e in events(tmp_path / "a").Scalars("mismatch/kl_exact")]
    run(tmp_path / "a", RunConfig(), RunFolder.open, replayed=6)
    after = [e.wall_time for e in events(tmp_path / "a").Scalars("mismatch/kl_exact")]
    assert after == pytest.approx(before, abs=0.1)


def session_groups(logdir):
    """What the HPARAMS tab of ``tensorboard --logdir`` asks its backend for."""
    from tensorboard import context
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    asked = context.RequestContext()
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir)).Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    backend = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    statuses = [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_UNKNOWN]
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[*statuses, api_pb2.STATUS_RUNNING], start_index=0, slice_size=10
    )
    response = list_session_groups.Handler(asked, backend, "", request).run()
    metadata = backend.hparams_metadata(asked, "")
    experiment = backend.experiment_from_metadata(
        asked, "", True, metadata, backend.hparams_from_data_provider(asked, "", 0)
    )
    return {group.name: group for group in response.session_groups}, experiment


def test_the_hparams_tab_shows_mismatch_against_quality(tmp_path):
    run(tmp_path / "clean", RunConfig())
    run(tmp_path / "stale", RunConfig(staleness=4))
    run(tmp_path / "noisy", RunConfig(perturb="masked(weight_noise(0.5), include='mlp')"))
    groups, experiment = session_groups(tmp_path)
    assert set(groups) == {"clean/hparams", "stale/hparams", "noisy/hparams"}
    values = {m.name.tag: m.value for m in groups["stale/hparams"].metric_values}
    assert values == {
        "final/dose": 0.25,
        "final/quality": 0.75,
        "final/quality_change": -0.25,
        "final/kl_exact_mean": 0.5,
    }
    settings = groups["stale/hparams"].hparams
    assert settings["staleness"].number_value == 4
    assert settings["perturb"].string_value == "stale(k=4)"
    assert settings["noise.sigma"].number_value == 0
    assert groups["noisy/hparams"].hparams["noise.sigma"].number_value == 0.5
    differ = {info.name for info in experiment.hparam_infos if info.differs}
    assert differ == {"staleness", "perturb", "noise.sigma"}


def test_a_run_that_fails_says_so(tmp_path):
    with pytest.raises(RunError, match="diverged"), RunWriter(tmp_path, RunConfig()) as board:
        board.write(0, {"a/b": 1.0})
        raise RunError("diverged")
    groups, _ = session_groups(tmp_path)
    [session] = next(iter(groups.values())).sessions
    assert session.status == 2  # STATUS_FAILURE


def test_an_unused_writer_writes_nothing(tmp_path):
    with RunWriter(tmp_path / "none", RunConfig()):
        pass
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write events"):
        RunWriter(tmp_path / "file" / "x", RunConfig()).write(0, {})


def test_hparams_name_every_strength_and_are_plain_values():
    values = hparams(RunConfig(perturb="stale(2)|weight_noise(linear(0.0, 0.1, 50))"))
    assert values["staleness"] == 2
    assert str(values["noise.sigma"]).startswith("linear(")
    assert all(type(v) in (bool, int, float, str) for v in values.values())


@pytest.mark.parametrize("missing", [None, math.nan, "nan", {"value": None}])
def test_what_is_missing_is_left_out_of_the_point(missing):
    result = dict.fromkeys(("dose", "kl_exact_mean", "quality"), missing) | {"clean": None}
    assert final_metrics(result) == {}
