"""Ranks that ask where others are, and are sure, sooner than in real life."""

from __future__ import annotations

import datetime

from shardcore.agree import presence
from shardcore.comm.channel import Channel
from shardcore.comm.data import DataTransport


def hurry() -> None:
    """Let this rank hurry, with the models that are sharded from now on."""
    presence._TICK, presence._ASKS, presence._SURE, presence._TELLS = 0.05, 0.5, 0.3, 0.6
    Channel.looks = DataTransport.looks = datetime.timedelta(seconds=0.05)
