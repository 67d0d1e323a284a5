"""The precision tail: how many of the newest rows stay exact (rules T1-T5 and T12).

A request is text, parsed once into a ``TailRequest`` that knows no model. ``cache_groups`` says
which groups of layers a model has, and ``resolve`` what the request comes to there. All three are
plain values, so that a dry run and the real plan share one request and one answer.
"""

from kvkernels.request.grammar import TailMode as TailMode
from kvkernels.request.grammar import TailRequest as TailRequest
from kvkernels.request.groups import CacheGroup as CacheGroup
from kvkernels.request.groups import Family as Family
from kvkernels.request.groups import cache_groups as cache_groups
from kvkernels.request.resolution import Representation as Representation
from kvkernels.request.resolution import ResolvedTail as ResolvedTail
from kvkernels.request.resolution import TailNote as TailNote
from kvkernels.request.resolution import TailOp as TailOp
from kvkernels.request.resolution import TailRoute as TailRoute
from kvkernels.request.resolution import resolve as resolve
