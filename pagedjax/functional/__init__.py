"""Paged sampling inside the user's own jit: pure functions of arrays, without an engine, a scheduler or a host loop."""

from pagedjax.functional.keys import request_keys as request_keys
from pagedjax.functional.rollout import Generated as Generated
from pagedjax.functional.rollout import Rollout as Rollout
from pagedjax.functional.rollout import generate as generate
from pagedjax.functional.scoring import join as join
from pagedjax.functional.scoring import score as score
from pagedjax.functional.scoring import score_rollout as score_rollout
from pagedjax.functional.steps import PagedState as PagedState
from pagedjax.functional.steps import decode_step as decode_step
from pagedjax.functional.steps import fork as fork
from pagedjax.functional.steps import init_kv_cache as init_kv_cache
from pagedjax.functional.steps import prefill as prefill
