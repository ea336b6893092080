import json

from harness.tuning import draw


def require_one_protocol(outcome):
    """Require that an outcome holds the trials that its search space, seed and rungs give."""
    protocol = outcome.protocol
    assert list(outcome.trials) == sorted(outcome.trials, key=lambda trial: trial.rank)
    budgets = [share for count, share in protocol.rungs for _ in range(count)]
    shares = [round(trial.budget / protocol.seconds, 9) for trial in outcome.trials]
    assert sorted(shares) == sorted(budgets)
    drawn = draw(outcome.optimizer, protocol)
    for stored in outcome.trials:
        expected = dict(drawn[stored.draw])
        constant = expected.pop("schedule") == "constant"
        settings = dict(stored.settings)
        assert (settings.pop("schedule_steps") is None) == constant
        assert json.dumps(settings, sort_keys=True) == json.dumps(expected, sort_keys=True)
