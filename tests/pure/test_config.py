"""`Config`, its defaults, and the size formulas, against numbers that DeepEP itself gave."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_ep import sizing
from deep_ep.config import Config, combine_config, dispatch_config

NVL_SEND = "num_max_nvl_chunked_send_tokens"
NVL_RECV = "num_max_nvl_chunked_recv_tokens"
RDMA_SEND = "num_max_rdma_chunked_send_tokens"
RDMA_RECV = "num_max_rdma_chunked_recv_tokens"


@pytest.mark.parametrize(
    ("config", "num_ranks", "nvl_bytes", "rdma_bytes"),
    [
        (Config(24, 8, 256), 8, 402851712, 0),
        (Config(20, 6, 256, 6, 128), 8, 335709824, 0),
        (Config(20, 6, 256, 6, 128), 4, 167854976, 0),
        (Config(20, 24, 256, 6, 128), 2, 83927552, 0),
        (Config(20, 36, 288, 20, 128), 16, 377673984, 91887744),
        (Config(20, 4, 288, 12, 128), 16, 377673984, 86637184),
        (Config(20, 32, 288, 8, 128), 32, 377675264, 168023680),
    ],
)
def test_size_hints_are_deepeps(config, num_ranks, nvl_bytes, rdma_bytes):
    assert config.get_nvl_buffer_size_hint(14336, num_ranks) == nvl_bytes
    assert config.get_rdma_buffer_size_hint(14336, num_ranks) == rdma_bytes


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_ranks", "num_experts", "expected"),
    [
        (128, 7168, 8, 288, 2146961792),
        (128, 7168, 16, 256, 1908410496),
        (16, 5120, 8, 256, 170395776),
        (128, 4096, 2, 64, 272630400),
    ],
)
def test_low_latency_hint_is_deepeps(num_tokens, hidden, num_ranks, num_experts, expected):
    assert sizing.low_latency_buffer_bytes(num_tokens, hidden, num_ranks, num_experts) == expected


def test_low_latency_slots_of_odd_hidden_sizes():
    # 130 channels are 2 groups: 16 + 260 = 276 -> 288 to dispatch, 8 + 260 = 268 -> 272 to combine.
    assert sizing.low_latency_dispatch_slot_bytes(130) == 288
    assert sizing.low_latency_combine_slot_bytes(130) == 272
    # One channel: FP8 with its scale (5) needs more than BF16 (2): 16 + 5 -> 32; 4 + 2 -> 16.
    assert sizing.low_latency_dispatch_slot_bytes(1) == 32
    assert sizing.low_latency_combine_slot_bytes(1) == 16


def test_low_latency_hint_always_has_slack():
    # 2 * (send 32*16 + recv 32*32 + signals 128) = 3328 = 26 * 128: exactly full, so one unit more.
    assert sizing.low_latency_buffer_bytes(1, 1, 1, 32) == 3328 + 128


@pytest.mark.parametrize(
    ("num_ranks", "nodes", "local"), [(1, 1, 1), (3, 1, 3), (8, 1, 8), (9, 2, 8), (16, 2, 8), (20, 3, 8)]
)
def test_hints_count_nodes_of_eight_rounded_up(num_ranks, nodes, local):
    assert sizing.split_ranks(num_ranks) == (nodes, local)
    # 2 channels, 3 slots; a row of 128 bytes travels with 8 + 1024 + 512 + 512 more, between nodes 16 more.
    config = Config(4, 1, 3, 1, 3)
    nvl_bytes = 2 * local * ((2 * nodes + 3) * 4 + 3 * 2184)
    rdma_bytes = 0 if nodes == 1 else 2 * 2 * nodes * (72 + 3 * 2200)
    assert config.get_nvl_buffer_size_hint(128, num_ranks) == -(-nvl_bytes // 128) * 128
    assert config.get_rdma_buffer_size_hint(128, num_ranks) == -(-rdma_bytes // 128) * 128


@pytest.mark.parametrize(("num_sms", "channels"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (20, 10), (21, 10)])
def test_two_sms_make_a_channel(num_sms, channels):
    config = Config(num_sms)
    assert config.num_channels == channels
    per_channel = Config(2).get_nvl_buffer_size_hint(1024, 8)
    assert config.get_nvl_buffer_size_hint(1024, 8) == pytest.approx(channels * per_channel, abs=128 * channels)


def test_defaults_and_keywords():
    assert Config() == Config(20, 6, 256, 6, 256)
    by_name = {"num_sms": 24, NVL_SEND: 8, NVL_RECV: 128, RDMA_SEND: 4, RDMA_RECV: 64}
    assert Config(**by_name) == Config(24, 8, 128, 4, 64)


def test_rdma_slots_round_up_to_what_is_sent_at_once():
    assert Config(20, 6, 256, 6, 128).num_max_rdma_chunked_recv_tokens == 132
    assert Config(20, 6, 256, 8, 128).num_max_rdma_chunked_recv_tokens == 128
    assert Config().num_max_rdma_chunked_recv_tokens == 258


def test_equality_hash_repr_pickle():
    config = Config(20, 6, 256, 6, 128)
    assert config == Config(20, 6, 256, 6, 132)
    assert config != Config(22, 6, 256, 6, 128)
    assert len({config, Config(20, 6, 256, 6, 128)}) == 1
    assert repr(config).startswith("Config(num_sms=20, num_max_nvl_chunked_send_tokens=6,")
    assert eval(repr(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", ["num_sms", NVL_SEND, NVL_RECV, RDMA_SEND, RDMA_RECV, "num_channels"])
def test_attributes_are_read_only(name):
    with pytest.raises(AttributeError):
        setattr(Config(), name, 4)


@pytest.mark.parametrize(
    ("changed", "name", "limit", "seen"),
    [
        ({"num_sms": -1}, "num_sms", 0, -1),
        ({NVL_SEND: 0}, NVL_SEND, 1, 0),
        ({NVL_RECV: 0}, NVL_RECV, 7, 0),
        ({NVL_RECV: 6}, NVL_RECV, 7, 6),
        ({RDMA_SEND: 0}, RDMA_SEND, 1, 0),
        ({RDMA_RECV: -3}, RDMA_RECV, 12, -3),
        ({RDMA_SEND: 7, RDMA_RECV: 13}, RDMA_RECV, 14, 13),
    ],
)
def test_values_beyond_their_limit(changed, name, limit, seen):
    with pytest.raises(ValueError, match=rf"{name} must be at least {limit}\b.*got {seen}$"):
        Config(**changed)


def test_values_at_their_limit():
    Config(0, 1, 2, 1, 2)
    Config(20, 6, 7, 7, 14)


@pytest.mark.parametrize("value", [1.5, "20", None])
def test_wrong_types(value):
    with pytest.raises(TypeError, match="num_sms must be an integer"):
        Config(value)
    with pytest.raises(TypeError, match="hidden_bytes must be an integer"):
        Config().get_nvl_buffer_size_hint(value, 8)
    with pytest.raises(TypeError, match="num_ranks must be an integer"):
        Config().get_rdma_buffer_size_hint(8, value)
    with pytest.raises(TypeError):
        Config(num_blocks=3)


def test_bad_hint_arguments():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        Config().get_nvl_buffer_size_hint(14336, 0)
    with pytest.raises(ValueError, match="hidden_bytes must be at least 0, got -1"):
        Config().get_rdma_buffer_size_hint(-1, 16)
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        sizing.low_latency_buffer_bytes(128, 7168, 0, 8)
    with pytest.raises(ValueError, match="num_max_dispatch_tokens_per_rank must be at least 0, got -1"):
        sizing.low_latency_buffer_bytes(-1, 7168, 8, 8)


@pytest.mark.parametrize(
    ("num_ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 128), (10, 256, 6, 128)),
        (4, (6, 256, 6, 128), (9, 256, 6, 128)),
        (8, (6, 256, 6, 128), (4, 256, 6, 128)),
        (16, (36, 288, 20, 128), (4, 288, 12, 128)),
        (24, (32, 288, 8, 128), (1, 288, 8, 128)),
        (32, (32, 288, 8, 128), (1, 288, 8, 128)),
        (48, (32, 288, 8, 128), (1, 288, 8, 128)),
        (64, (32, 288, 8, 128), (1, 288, 8, 128)),
        (96, (20, 480, 12, 128), (1, 480, 8, 128)),
        (128, (20, 560, 12, 128), (1, 560, 8, 128)),
        (144, (32, 720, 12, 128), (2, 720, 8, 128)),
        (160, (28, 720, 12, 128), (2, 720, 8, 128)),
    ],
)
def test_default_configs_of_listed_sizes(num_ranks, dispatch, combine):
    assert dispatch_config(num_ranks, 20) == Config(20, *dispatch)
    assert combine_config(num_ranks, 24) == Config(24, *combine)


@pytest.mark.parametrize(
    ("num_ranks", "listed"),
    [(1, 2), (3, 4), (5, 8), (9, 16), (17, 24), (33, 48), (65, 96), (150, 160), (1000, 160)],
)
def test_default_configs_of_other_sizes(num_ranks, listed):
    assert dispatch_config(num_ranks, 20) == dispatch_config(listed, 20)
    assert combine_config(num_ranks, 20) == combine_config(listed, 20)


@pytest.mark.parametrize("default", [dispatch_config, combine_config])
def test_default_configs_need_a_rank(default):
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        default(0, 20)


@given(st.integers(0, 10**9), st.integers(1, 10**4))
def test_align_and_ceil_div(value, unit):
    aligned = sizing.align(value, unit)
    assert aligned % unit == 0
    assert value <= aligned < value + unit
    assert sizing.ceil_div(value, unit) * unit == aligned
