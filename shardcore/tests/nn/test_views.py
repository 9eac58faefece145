from __future__ import annotations

import copy

from shardcore.nn.copies import with_value


class Config:
    def __init__(self):
        self.heads, self.width = 8, 32

    @property
    def size(self):
        return self.width // self.heads


def test_a_view_has_values_of_its_own_and_shares_the_rest():
    whole = Config()
    view = with_value(with_value(whole, "heads", 2), "groups", 3)
    assert (view.heads, view.groups, view.width, view.size) == (2, 3, 32, 16)
    assert type(view).__name__ == "Config"
    assert isinstance(view, Config)
    assert type(view).__mro__[1] is Config
    assert (whole.heads, vars(view)) == (8, {"heads": 8, "width": 32}), "what is saved is the whole model's"
    whole.width = 64
    assert view.width == 64
    view.late = True
    assert whole.late
    clone = copy.deepcopy(view)
    clone.width = 1
    assert (clone.heads, whole.width) == (2, 64)
