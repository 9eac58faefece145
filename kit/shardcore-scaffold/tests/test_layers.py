"""Which layers the small copy of a model has."""

from __future__ import annotations

from shardcore_scaffold.layers import Layers


def test_a_layer_of_each_kind() -> None:
    fields = {"num_hidden_layers": 6, "layer_types": [*["linear"] * 3, "full", *["linear"] * 2]}
    found = Layers(fields, 2)
    assert found.found == {"num_hidden_layers": 2, "layer_types": ["linear", "full"]}
    assert Layers(fields, 4).found["layer_types"] == ["linear", "linear", "linear", "full"]


def test_places_of_some_layers_are_theirs_in_the_copy() -> None:
    fields = {"num_hidden_layers": 9, "attn_layer_indices": [4, 7], "hidden_sizes": [4, 7], "mlp_only_layers": []}
    found = Layers(fields, 2).found
    assert found == {"num_hidden_layers": 2, "attn_layer_indices": [1]}  # layers 0 and 4


def test_lists_of_one_length_are_kept_together() -> None:
    fields = {"num_hidden_layers": 3, "layer_types": ["a", "b", "b"], "mlp_layer_types": ["x", "x", "y"]}
    found = Layers(fields, 2).found
    assert found["layer_types"] == ["a", "b", "b"]
    assert found["mlp_layer_types"] == ["x", "x", "y"]


def test_layers_that_share_keys_follow_one_of_each_kind() -> None:
    fields = {"num_hidden_layers": 4, "layer_types": ["s", "f", "s", "f"], "num_kv_shared_layers": 1}
    found = Layers(fields, 2)
    assert found.found["layer_types"] == ["s", "f", "s", "f"]
    assert (found.count, found.found["num_kv_shared_layers"]) == (4, 2)


def test_sizes_of_layers_are_no_kinds() -> None:
    found = Layers({"num_hidden_layers": 3, "intermediate_size": [128, 256, 512]}, 2)
    assert found.found == {"num_hidden_layers": 2}
    assert Layers({"hidden_size": 8, "layer_types": ["a"]}, 2).found == {}
