from __future__ import annotations

import random

from vime_launch.placement import Bundle, merge_environment, order_bundles, sort_gpu_ids, visible_devices


def test_device_ids_are_ordered_as_numbers():
    ids = [str(one) for one in range(12)]
    shuffled = ids[:]
    random.Random(1).shuffle(shuffled)
    assert sort_gpu_ids(shuffled) == ids
    assert visible_devices(shuffled) == "0,1,2,3,4,5,6,7,8,9,10,11"
    assert sort_gpu_ids(["GPU-b", 3, "GPU-a"]) == ["3", "GPU-a", "GPU-b"]


def test_shuffled_bundles_come_host_by_host_in_device_order():
    bundles = [Bundle(index, f"host-{index % 2}", (str(index // 2 + 6),)) for index in range(12)]
    expected = [(f"host-{host}", str(gpu)) for host in range(2) for gpu in range(6, 12)]
    for seed in range(20):
        shuffled = bundles[:]
        random.Random(seed).shuffle(shuffled)
        assert [(one.host, one.gpus[0]) for one in order_bundles(shuffled)] == expected


def test_neighbours_share_a_host_whatever_the_bundles_say():
    order = [one.host for one in order_bundles([Bundle(i, host) for i, host in enumerate("abcabcabc")])]
    assert order == list("aaabbbccc")


def test_environment():
    base = {"A": "1", "CUDA_VISIBLE_DEVICES": "7"}
    assert merge_environment(base, {"A": "2"}, ["10", "9"]) == {"A": "2", "CUDA_VISIBLE_DEVICES": "9,10"}
    assert merge_environment(base, {}, []) == base
