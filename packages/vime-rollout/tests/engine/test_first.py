import models
import numpy as np

PROMPT = [1, 5, 9, 17, 33, 40, 8]


def test_generates_and_takes_new_weights(moe):
    first = moe.generate(PROMPT, 16)
    assert len(first.tokens) == 16 and np.isfinite(first.logprobs).all()
    pusher = moe.pusher("shm")
    pusher.push(moe.tensors, moe.next_version(), chunks=1)
    again = moe.generate(PROMPT, 16)
    assert again.tokens == first.tokens and np.array_equal(again.logprobs, first.logprobs)
    pusher.push(models.weights(moe.config, 7), moe.next_version(), chunks=3)
    other = moe.generate(PROMPT, 16)
    assert other.tokens != first.tokens
    pusher.push(moe.tensors, moe.next_version(), chunks=3)
    again = moe.generate(PROMPT, 16)
    assert again.tokens == first.tokens and np.array_equal(again.logprobs, first.logprobs)
