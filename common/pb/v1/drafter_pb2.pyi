from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FeatureForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_FORM_UNSPECIFIED: _ClassVar[FeatureForm]
    FEATURE_FORM_RAW_LAYERS: _ClassVar[FeatureForm]
    FEATURE_FORM_PROJECTED: _ClassVar[FeatureForm]

class FeatureDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_DTYPE_UNSPECIFIED: _ClassVar[FeatureDtype]
    FEATURE_DTYPE_BF16: _ClassVar[FeatureDtype]
    FEATURE_DTYPE_FP32: _ClassVar[FeatureDtype]
FEATURE_FORM_UNSPECIFIED: FeatureForm
FEATURE_FORM_RAW_LAYERS: FeatureForm
FEATURE_FORM_PROJECTED: FeatureForm
FEATURE_DTYPE_UNSPECIFIED: FeatureDtype
FEATURE_DTYPE_BF16: FeatureDtype
FEATURE_DTYPE_FP32: FeatureDtype

class GetDrafterInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrafterInfoResponse(_message.Message):
    __slots__ = ("drafter_id", "incarnation", "contract", "verdict_json", "load_report_json", "max_sessions", "num_sessions")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_JSON_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    incarnation: int
    contract: Contract
    verdict_json: str
    load_report_json: str
    max_sessions: int
    num_sessions: int
    def __init__(self, drafter_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ..., verdict_json: _Optional[str] = ..., load_report_json: _Optional[str] = ..., max_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class Contract(_message.Message):
    __slots__ = ("target_family", "drafter_family", "hidden_size", "num_target_layers", "vocab_size", "target_layer_ids", "block_size", "mask_token_id", "rope", "context_window")
    TARGET_FAMILY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FAMILY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    target_family: str
    drafter_family: str
    hidden_size: int
    num_target_layers: int
    vocab_size: int
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    mask_token_id: int
    rope: str
    context_window: int
    def __init__(self, target_family: _Optional[str] = ..., drafter_family: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_target_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., rope: _Optional[str] = ..., context_window: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("hello", "step", "ping", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    ping: Ping
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("welcome", "proposals", "evicted", "pong", "drain")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    proposals: Proposals
    evicted: Evicted
    pong: Pong
    drain: Drain
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., proposals: _Optional[_Union[Proposals, _Mapping]] = ..., evicted: _Optional[_Union[Evicted, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "verifier_id", "incarnation", "contract", "feature_form", "feature_dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FORM_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    verifier_id: str
    incarnation: int
    contract: Contract
    feature_form: FeatureForm
    feature_dtype: FeatureDtype
    def __init__(self, protocol_version: _Optional[int] = ..., verifier_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., contract: _Optional[_Union[Contract, _Mapping]] = ..., feature_form: _Optional[_Union[FeatureForm, str]] = ..., feature_dtype: _Optional[_Union[FeatureDtype, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "drafter_id", "incarnation", "max_sessions", "max_step_rows", "max_context_len")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    drafter_id: str
    incarnation: int
    max_sessions: int
    max_step_rows: int
    max_context_len: int
    def __init__(self, protocol_version: _Optional[int] = ..., drafter_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_step_rows: _Optional[int] = ..., max_context_len: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "entries", "rows", "close_ids", "quiet")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_IDS_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    rows: bytes
    close_ids: _containers.RepeatedScalarFieldContainer[int]
    quiet: bool
    def __init__(self, step_id: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., rows: _Optional[bytes] = ..., close_ids: _Optional[_Iterable[int]] = ..., quiet: bool = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("session_id", "epoch", "base_len", "num_rows", "num_draft_tokens", "anchor_id", "sampling", "first_len")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FIRST_LEN_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    base_len: int
    num_rows: int
    num_draft_tokens: int
    anchor_id: int
    sampling: DraftSampling
    first_len: int
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., anchor_id: _Optional[int] = ..., sampling: _Optional[_Union[DraftSampling, _Mapping]] = ..., first_len: _Optional[int] = ...) -> None: ...

class DraftSampling(_message.Message):
    __slots__ = ("mode", "temperature", "seed", "top_k")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[DraftSampling.Mode]
        MODE_GREEDY: _ClassVar[DraftSampling.Mode]
        MODE_SAMPLED: _ClassVar[DraftSampling.Mode]
        MODE_COUPLED: _ClassVar[DraftSampling.Mode]
    MODE_UNSPECIFIED: DraftSampling.Mode
    MODE_GREEDY: DraftSampling.Mode
    MODE_SAMPLED: DraftSampling.Mode
    MODE_COUPLED: DraftSampling.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    mode: DraftSampling.Mode
    temperature: float
    seed: int
    top_k: int
    def __init__(self, mode: _Optional[_Union[DraftSampling.Mode, str]] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("step_id", "proposals", "queue_us", "ingest_us", "draft_us")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    INGEST_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    queue_us: int
    ingest_us: int
    draft_us: int
    def __init__(self, step_id: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., queue_us: _Optional[int] = ..., ingest_us: _Optional[int] = ..., draft_us: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session_id", "epoch", "base_len", "status", "detail", "token_ids", "confidence_logits", "top_k", "candidate_ids", "candidate_probs")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Proposal.Status]
        STATUS_OK: _ClassVar[Proposal.Status]
        STATUS_UNKNOWN_SESSION: _ClassVar[Proposal.Status]
        STATUS_BASE_MISMATCH: _ClassVar[Proposal.Status]
        STATUS_NO_ROOM: _ClassVar[Proposal.Status]
        STATUS_INVALID: _ClassVar[Proposal.Status]
    STATUS_UNSPECIFIED: Proposal.Status
    STATUS_OK: Proposal.Status
    STATUS_UNKNOWN_SESSION: Proposal.Status
    STATUS_BASE_MISMATCH: Proposal.Status
    STATUS_NO_ROOM: Proposal.Status
    STATUS_INVALID: Proposal.Status
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_LOGITS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_PROBS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    base_len: int
    status: Proposal.Status
    detail: str
    token_ids: bytes
    confidence_logits: bytes
    top_k: int
    candidate_ids: bytes
    candidate_probs: bytes
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., status: _Optional[_Union[Proposal.Status, str]] = ..., detail: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., confidence_logits: _Optional[bytes] = ..., top_k: _Optional[int] = ..., candidate_ids: _Optional[bytes] = ..., candidate_probs: _Optional[bytes] = ...) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "num_sessions")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    num_sessions: int
    def __init__(self, nonce: _Optional[int] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
