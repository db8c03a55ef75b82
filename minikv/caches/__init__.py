"""What is remembered of the tokens seen so far? One storage policy a file, all with the protocol of `Cache`."""

from .base import Cache, all_or_none, truncate_all
from .concat import ConcatCache
from .contiguous import ContiguousCache
from .growing import KVCache
from .rolling import RollingCache

__all__ = ["Cache", "ConcatCache", "ContiguousCache", "KVCache", "RollingCache", "all_or_none", "truncate_all"]
