"""The entry point that every vLLM process runs."""

import pytest

from vime_rollout.engine.backend import plugin


def test_a_transport_of_the_same_name_is_refused_at_registration(monkeypatch):
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    plugin.register()
    assert list(WeightTransferEngineFactory._registry) == [plugin.NAME]
    with pytest.raises(ValueError, match="cannot register the weight transport 'vime' with vLLM: .*already registered"):
        plugin.register()
