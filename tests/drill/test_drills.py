"""Drills without their PODs: files, places that are drawn, answers, scores, replies."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from podrun.core.errors import ConfigError, DeadlineError, NotFoundError, PodrunError
from podrun.core.telemetry import ControlEvent
from podrun.drill.commands.drill import drill_verb
from podrun.drill.play import ANSWERS, SERVICE_LOG, DrillGame, explained, play, send_answer
from podrun.drill.scenario import built_in_drills, check_answer_form, load_scenario, normal_answer
from podrun.drill.scoring import DAMAGE, Judgement, collateral_damage, judge, score_drill

NAMES = sorted(built_in_drills())


@pytest.mark.parametrize("name", NAMES)
def test_every_place_of_every_drill_can_be_drawn(name: str) -> None:
    scenarios = [load_scenario(name, seed) for seed in range(8)]
    drawn = {scenario.answers for scenario in scenarios}
    for scenario in scenarios:
        for answer in scenario.answers:
            assert len(check_answer_form(answer)) == 3
        assert judge(scenario, scenario.answers[0]) is Judgement.RIGHT
        assert "{" not in scenario.explanation + scenario.story
        assert scenario.solution
        assert scenario.par_s < scenario.limit_s
    assert load_scenario(name, 7) == scenarios[7]
    assert len(drawn) > 1 or name in ("full-disk", "slow-controller")


def test_answers_are_judged_by_place_and_kind() -> None:
    scenario = load_scenario("link-flap", 3)
    target, place, kind = scenario.answers[0].split(":")
    first, second = place.split("-")
    assert judge(scenario, f"LINK: {second}-{first} :Degraded") is Judgement.RIGHT
    assert judge(scenario, f"link:{place}:down") is Judgement.PLACE
    assert judge(scenario, f"link:9-10:{kind}") is Judgement.KIND
    assert judge(scenario, "ipu:1:slow") is Judgement.WRONG
    assert judge(scenario, "nonsense") is Judgement.WRONG
    assert normal_answer("link:10-9:down") == "link:9-10:down"
    assert target == "link"


@pytest.mark.parametrize(
    ("seconds", "wrong", "hints", "damage", "points"),
    [
        (10.0, 0, 0, 0, 100),
        (120.0, 0, 0, 0, 100),
        (510.0, 0, 0, 0, 70),  # Half the way from par (120 s) to the limit (900 s).
        (900.0, 0, 0, 0, 40),
        (10.0, 2, 1, 1, 100 - 20 - 10 - DAMAGE),
        (900.0, 9, 9, 9, 0),
        (None, 0, 0, 0, 0),
    ],
)
def test_points_go_down_with_time_wrong_answers_hints_and_damage(
    seconds: float | None, wrong: int, hints: int, damage: int, points: int
) -> None:
    score = score_drill(load_scenario("link-flap", 1), seconds, wrong, hints, ["x"] * damage)
    assert score.points == points
    assert score.solved == (seconds is not None)


def test_damage_is_what_the_drill_does_not_allow() -> None:
    scenario = load_scenario("lost-machine", 1)
    events = {
        "train": [ControlEvent("partition reset", "", 1.0), ControlEvent("machine lost", "ipum1", 2.0)],
        "other": [ControlEvent("partition removed", "", 3.0)],
    }
    damage = collateral_damage(scenario, events, ["other"])
    assert damage == ["partition removed (partition other)", "the job of partition other ended"]


class FakePod:
    """A POD whose health the test sets."""

    def __init__(self, name: str) -> None:
        self.scenario = load_scenario(name, 3)
        self.struck = self.healthy = False

    def has_struck(self) -> bool:
        return self.struck

    def is_healthy(self) -> bool:
        return self.healthy

    def changes(self) -> dict[str, list[ControlEvent]]:
        return {}

    def ended_jobs(self) -> list[str]:
        return []


def game_of(pod: FakePod, now: list[float]) -> DrillGame:
    return DrillGame(pod, lambda line: None, lambda: now[0])  # type: ignore[arg-type]


def test_the_clock_runs_from_the_strike_to_the_healthy_pod() -> None:
    pod, now = FakePod("lost-machine"), [0.0]
    game = game_of(pod, now)
    now[0] = 50.0
    game.tick()
    pod.struck = True
    now[0] = 60.0
    game.tick()  # It has struck: the clock begins.
    now[0] = 70.0
    assert game.hear("ipu:1:slow") == "No: wrong."
    assert "make the POD healthy again" in game.hear(pod.scenario.answers[0])
    assert not game.over
    pod.healthy = True
    now[0] = 90.0
    game.tick()
    assert game.over
    score = game.score()
    assert (score.seconds, score.wrong_answers, score.points) == (30.0, 1, 90)


def test_the_service_says_nothing_on_the_terminal_of_the_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class TalkingPod(FakePod):
        def __init__(self, *_: object) -> None:
            super().__init__("lost-machine")

        def start(self, say: object) -> None:
            logging.getLogger("podrun.partition").warning("machine ipum1 is lost")
            raise DeadlineError("the jobs do not work")

        def stop(self) -> None:
            pass

    monkeypatch.setattr("podrun.drill.play.DrillPod", TalkingPod)
    with pytest.raises(DeadlineError):
        play(load_scenario("lost-machine", 1), tmp_path, lambda line: None)
    assert caplog.text == ""
    assert "WARNING machine ipum1 is lost" in (tmp_path / SERVICE_LOG).read_text()


def test_time_hints_and_giving_up() -> None:
    pod, now = FakePod("hot-ipu"), [0.0]
    pod.struck = True
    game = game_of(pod, now)
    game.tick()
    assert game.hear("hint") == pod.scenario.hints[0]
    assert game.hear("HINT ") == "There are no more hints."
    assert "TARGET:PLACE:KIND" in game.hear("it is the fan")
    assert game.wrong == 0
    now[0] = 10_000.0
    game.tick()
    assert game.over
    assert game.score().points == 0
    other = game_of(pod, [0.0])
    assert other.hear("give up")
    assert other.over
    text = "\n".join(explained(pod.scenario, other.score()))
    assert pod.scenario.answers[0] in text
    assert "not solved" in text


MINIMAL = """
version: 1
title: T
story: S
jobs: [{partition: a, size: 4}]
answers: ["ipu:1:slow"]
explanation: E
solution: [podrun health]
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("answers: [slow]", "answers"),
        ("jobs: []", "jobs"),
        ("extra: 1", "extra"),
        ('faults: [{partition: b, fault: "ipu:0@batch=1:slow"}]', "no job has partition 'b'"),
        ('faults: [{partition: a, fault: "ipu:0@batch=1:slowly"}]', "did you mean 'slow'"),
        ("job-faults: [nothing]", "fault 'nothing' is not of the form"),
        ("story: '{nobody}'", "nobody"),
        ("jobs: [{partition: a, size: 4, program: missing.py}]", "missing.py"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, change: str, said: str) -> None:
    file = tmp_path / "own.drill.yaml"
    key = change.split(":", maxsplit=1)[0]
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(f"{key}:")]
    file.write_text("\n".join([*lines, change]))
    with pytest.raises(ConfigError, match=said) as caught:
        load_scenario(str(file), 1)
    assert str(file) in caught.value.message


def test_a_drill_of_ones_own_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "own.drill.yaml"
    file.write_text(MINIMAL)
    done = CliRunner().invoke(drill_verb, ["check", str(file)])
    assert done.exit_code == 0
    assert load_scenario(str(file), 1).name == "own"


def test_words_that_say_nothing_and_unknown_drills() -> None:
    for words in (["one", "two"], ["nothing-of-this-name"]):
        done = CliRunner().invoke(drill_verb, words)
        assert isinstance(done.exception, PodrunError)
        assert done.exception.hint
    with pytest.raises(NotFoundError, match="no drill"):
        load_scenario("nothing-of-this-name", 1)
    listed = CliRunner().invoke(drill_verb, []).stdout
    assert all(name in listed for name in NAMES)


def test_an_answer_needs_a_drill(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no drill runs"):
        send_answer(tmp_path, "ipu:1:slow")
    assert not (tmp_path / ANSWERS).exists()
