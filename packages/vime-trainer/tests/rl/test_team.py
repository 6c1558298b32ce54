"""What ranks say to one another, of ranks that are not there."""

from types import SimpleNamespace

import pytest

from vime_trainer.batch import RefusedSamplesError
from vime_trainer.rl._team import RankLostError, Team


def team():
    """A rank whose others do something else, as one that loads a model while this one has failed to."""

    def gather(values, what):
        raise RuntimeError("ranks are not in step")

    return Team(SimpleNamespace(world=2, rank=1, data_rank=1, data_size=2, is_last_stage=True, gather=gather))


def test_the_reason_is_not_lost_when_the_others_do_not_hear_it():
    with pytest.raises(FileNotFoundError, match="no model"), team().settled():
        raise FileNotFoundError("no model")


@pytest.mark.parametrize("error", [None, RefusedSamplesError({"s": "torn"})])
def test_ranks_that_are_gone_are_noticed(error):
    with pytest.raises(RankLostError, match="not in step"), team().settled():
        if error is not None:
            raise error
