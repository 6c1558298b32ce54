"""An algorithm as a user writes one: public names only."""

import numpy as np

from vime_trainer.algorithms import Algorithm, Terms


def advantage(batch, settings):
    centred = np.where(batch.usable, batch.rewards - np.nanmean(batch.rewards), 0.0)
    return {"advantages": batch.per_token(centred * settings.options["scale"])}


def loss(logprobs, entropy, streams, settings):
    return Terms(-streams["advantages"] * logprobs, {"surprise": -logprobs.detach()})


REINFORCE = Algorithm("reinforce", advantage, loss, needs_group=False)
