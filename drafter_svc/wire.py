"""The drafter's wire types to ours and back, checked. An edge beside `service.py`.

Knows no stream and no thread. Rows pass through as bytes.
"""

from common.contract import Contract
from common.errors import InvalidRequest
from common.pb.v1 import drafter_pb2 as pb
from common.tensors import itemsize
from drafter_svc.batcher import GREEDY, DraftMode, Entry, RowForm, Sampling, Step
from drafter_svc.engine import Evicted, Pong, Proposal, Reply, StepReply
from drafter_svc.sessions import Status

_MAX_POSITION = 2**32 - 1  # what `Proposal.base_len` can say
DTYPES = {pb.FEATURE_DTYPE_BF16: "bf16", pb.FEATURE_DTYPE_FP32: "fp32"}
_MODES = {
    pb.DraftSampling.MODE_UNSPECIFIED: DraftMode.GREEDY,
    pb.DraftSampling.MODE_GREEDY: DraftMode.GREEDY,
    pb.DraftSampling.MODE_SAMPLED: DraftMode.SAMPLED,
    pb.DraftSampling.MODE_COUPLED: DraftMode.COUPLED,
}
_STATUSES = {
    Status.OK: pb.Proposal.STATUS_OK,
    Status.UNKNOWN_SESSION: pb.Proposal.STATUS_UNKNOWN_SESSION,
    Status.BASE_MISMATCH: pb.Proposal.STATUS_BASE_MISMATCH,
    Status.NO_ROOM: pb.Proposal.STATUS_NO_ROOM,
    Status.INVALID: pb.Proposal.STATUS_INVALID,
}


def step_from_pb(
    step: pb.Step, link: int, form: RowForm, *, max_entries: int, max_rows: int
) -> Step:
    """Checks what only a broken peer gets wrong; what may be wrong per entry is the engine's.

    Raises InvalidRequest, which ends the stream.
    """
    for name, count in (("entries", len(step.entries)), ("close_ids", len(step.close_ids))):
        if count > max_entries:
            raise InvalidRequest(f"{count} {name} in a step, at most {max_entries} are allowed")
    entries = tuple(map(_entry_from_pb, step.entries))
    num_rows = sum(entry.num_rows for entry in entries)
    if num_rows > max_rows:
        raise InvalidRequest(f"{num_rows} rows in a step, at most {max_rows} are allowed")
    rows = step.rows  # read once: every read of a bytes field copies
    wanted = num_rows * form.width * itemsize(form.dtype)
    if len(rows) != wanted:
        raise InvalidRequest(
            f"rows has {len(rows)} bytes; {num_rows} rows of {form.width} {form.dtype} are {wanted}"
        )
    return Step(link, step.step_id, entries, rows, form, tuple(step.close_ids), step.quiet)


def _entry_from_pb(entry: pb.Entry) -> Entry:
    if entry.base_len + entry.num_rows > _MAX_POSITION:
        where = f"base_len {entry.base_len} and num_rows {entry.num_rows}"
        raise InvalidRequest(f"{where} end above position {_MAX_POSITION}")
    return Entry(
        entry.session_id,
        entry.epoch,
        entry.base_len,
        entry.num_rows,
        entry.num_draft_tokens,
        entry.anchor_id,
        _sampling_from_pb(entry.sampling) if entry.HasField("sampling") else GREEDY,
        entry.first_len,
    )


def _sampling_from_pb(sampling: pb.DraftSampling) -> Sampling:
    mode = _MODES.get(sampling.mode)
    if mode is None:
        raise InvalidRequest(f"draft sampling mode {sampling.mode} is unknown; 1, 2 and 3 exist")
    return Sampling(mode, sampling.temperature, sampling.seed, sampling.top_k)


def reply_to_pb(reply: Reply) -> pb.DraftResponse | None:
    """One message down; None where there is nothing to say."""
    match reply:
        case StepReply(quiet=True, proposals=[]):
            return None
        case Pong(_, nonce, num_sessions):
            return pb.DraftResponse(pong=pb.Pong(nonce=nonce, num_sessions=num_sessions))
        case Evicted(_, session_ids):
            return pb.DraftResponse(evicted=pb.Evicted(session_ids=session_ids))
        case StepReply():
            return pb.DraftResponse(
                proposals=pb.Proposals(
                    step_id=reply.step_id,
                    proposals=[_proposal_to_pb(proposal) for proposal in reply.proposals],
                    queue_us=round(reply.queue_s * 1e6),
                    ingest_us=round(reply.ingest_s * 1e6),
                    draft_us=round(reply.draft_s * 1e6),
                )
            )


def _proposal_to_pb(proposal: Proposal) -> pb.Proposal:
    entry = proposal.entry
    message = pb.Proposal(
        session_id=entry.session_id,
        epoch=entry.epoch,
        base_len=entry.anchor_position,
        status=_STATUSES[proposal.status],
        detail=proposal.detail,
    )
    if proposal.token_ids is not None:
        message.token_ids = proposal.token_ids.tobytes()
    if proposal.confidence_logits is not None:
        message.confidence_logits = proposal.confidence_logits.tobytes()
    if proposal.candidate_ids is not None and proposal.candidate_probs is not None:
        message.top_k = proposal.candidate_ids.shape[1]
        message.candidate_ids = proposal.candidate_ids.tobytes()
        message.candidate_probs = proposal.candidate_probs.tobytes()
    return message


def contract_to_pb(contract: Contract) -> pb.Contract:
    """Field by field: both sides name them alike."""
    return pb.Contract(**vars(contract))


def contract_from_pb(contract: pb.Contract) -> Contract:
    """As the peer says it."""
    values = {field.name: getattr(contract, field.name) for field in pb.Contract.DESCRIPTOR.fields}
    return Contract(**{**values, "target_layer_ids": tuple(contract.target_layer_ids)})
