// Written by `make ui-types` from the API's OpenAPI description. Do not edit.

export interface AdviceShown {
  step: "resolve_bills" | "limit_output" | "wait" | "grant" | "raise_daily_budget" | "change_graph" | "register_price" | "resume";
  message: string;
  amount_usd: number | null;
}

export interface AgentPage {
  agents: AgentShown[];
  next: string | null;
}

export interface AgentShown {
  id: string;
  name: string;
  version: number;
  made_for_chat: boolean;
}

export interface ApprovalAnsweredData {
  approval_id: string;
  state: string;
  by: string | null;
}

export interface ApprovalAnsweredEvent {
  seq: number;
  at_ms: number;
  type: "approval.answered";
  data: ApprovalAnsweredData;
}

export interface ApprovalPage {
  approvals: ApprovalShown[];
  next: string | null;
}

export interface ApprovalRequestedData {
  approval: AskedApproval;
}

export interface ApprovalRequestedEvent {
  seq: number;
  at_ms: number;
  type: "approval.requested";
  data: ApprovalRequestedData;
}

export interface ApprovalShown {
  id: string;
  run_id: string;
  owner: string;
  node_id: string;
  question: string;
  value: unknown;
  state: "waiting" | "approved" | "edited" | "rejected" | "withdrawn";
  answer: unknown;
  reason: string;
  asked_ms: number;
  answered_ms: number | null;
  answered_by: string | null;
  expects?: ToolShape | null;
}

export interface AskedApproval {
  id: string;
  run_id: string;
  node_id: string;
  question: string;
  value: unknown;
  state: string;
  asked_ms: number;
}

export interface AttachmentShown {
  id: string;
  name: string;
  media_type: string;
  size: number;
  created_ms: number;
}

export interface BillData {
  call_id: string;
  name: string | null;
  model: string | null;
  node_id?: string | null;
  by: string;
  cost_usd: number;
  tokens_in: number;
  tokens_out: number;
  held_usd: number;
}

export interface BillList {
  bills: BillShown[];
  unresolved_usd: number;
}

export interface BillPage {
  runs: RunBills[];
  next?: string | null;
}

export interface BillReleasedEvent {
  seq: number;
  at_ms: number;
  type: "bill.released";
  data: BillData;
}

export interface BillResolvedEvent {
  seq: number;
  at_ms: number;
  type: "bill.resolved";
  data: BillData;
}

export interface BillShown {
  call_id: string;
  name: string | null;
  model: string | null;
  held_usd: number;
  held_tokens: number;
  at_ms: number | null;
  reason: string;
}

export interface BudgetData {
  max_cost_usd?: number | null;
  max_steps?: number | null;
  max_tokens?: number | null;
  max_api_calls?: number | null;
  max_time_s?: number | null;
}

export interface BudgetEvent {
  seq: number;
  at_ms: number;
  type: "budget";
  data: BudgetShown;
}

export interface BudgetList {
  budgets: BudgetShown[];
  last_seq: number;
}

export interface BudgetShown {
  budget: string;
  level: "run" | "node" | "owner" | "all";
  node_id: string | null;
  units: UnitShown[];
}

export interface BudgetsOfDay {
  day: string;
  now_ms: number;
  resets_ms: number;
  budgets: DayBudgetShown[];
}

export interface CallEndedData {
  call_id: string;
  parent_id: string | null;
  kind: "system" | "llm" | "tool";
  name: string;
  node_id?: string | null;
  model?: string | null;
  replayed?: boolean | null;
  status: "success" | "fail" | "halt";
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  duration_ms: number;
  finish_reason?: string | null;
  stop_reason?: string | null;
  error?: string | null;
  retries_used?: number | null;
  abandoned?: boolean | null;
  stop?: StopShown | null;
}

export interface CallEndedEvent {
  seq: number;
  at_ms: number;
  type: "call.ended";
  data: CallEndedData;
}

export interface CallPayload {
  call_id: string;
  recording: "off" | "redacted" | "full";
  request: unknown;
  response: unknown;
  truncated: boolean;
  expired: boolean;
}

export interface CallSettledData {
  call_id: string;
  node_id: string | null;
  cost_usd: number;
  tokens_in: number;
  tokens_out: number;
}

export interface CallSettledEvent {
  seq: number;
  at_ms: number;
  type: "call.settled";
  data: CallSettledData;
}

export interface CallStartedData {
  call_id: string;
  parent_id: string | null;
  kind: "system" | "llm" | "tool";
  name: string;
  node_id?: string | null;
  model?: string | null;
  replayed?: boolean | null;
  depth: number;
  context: string;
  node_type?: string | null;
  attempt?: number | null;
  iteration?: number | null;
  held_usd?: number | null;
}

export interface CallStartedEvent {
  seq: number;
  at_ms: number;
  type: "call.started";
  data: CallStartedData;
}

export interface CallWaitingData {
  call_id: string;
  parent_id: string | null;
  kind: "system" | "llm" | "tool";
  name: string;
  node_id?: string | null;
  model?: string | null;
  replayed?: boolean | null;
  context: string;
  stop: StopShown;
}

export interface CallWaitingEvent {
  seq: number;
  at_ms: number;
  type: "call.waiting";
  data: CallWaitingData;
}

export interface CancelShown {
  result: "cancelled" | "already_cancelled" | "remembered" | "ended";
}

export interface CancelledData {
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  unresolved_usd?: number | null;
  unknown_costs?: number | null;
  reason: string;
  cause: string;
}

export interface ChangeShown {
  kind: "added" | "removed" | "changed";
  what: "node" | "edge" | "graph";
  id: string;
  path: string;
  before?: unknown;
  after?: unknown;
}

export interface ChatListed {
  id: string;
  owner: string;
  title: string;
  graph_id: string;
  created_ms: number;
  updated_ms: number;
  last: LastMessage | null;
}

export interface ChatPage {
  chats: ChatListed[];
  next: string | null;
}

export interface ChatPath {
  id: string;
  owner: string;
  title: string;
  graph_id: string;
  created_ms: number;
  updated_ms: number;
  messages: PlacedMessage[];
  has_earlier: boolean;
  has_later: boolean;
  end_id: string | null;
}

export interface ChatShown {
  id: string;
  owner: string;
  title: string;
  graph_id: string;
  created_ms: number;
  updated_ms: number;
}

export interface Checkup {
  findings: FindingShown[];
}

export interface CompletedData {
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  unresolved_usd?: number | null;
  unknown_costs?: number | null;
  output: unknown;
  finish_reason?: unknown;
}

export interface CreatedToken {
  token: TokenShown;
  secret: string;
  needs_tokens: boolean;
}

export interface DatabaseShown {
  url: string;
  version: number;
  size_bytes: number | null;
  unreadable_rows: number;
}

export interface DayBudgetShown {
  level: "all" | "team" | "owner";
  name: string;
  limit_usd: number | null;
  spent_usd: number;
  held_usd: number;
  unresolved_usd: number;
  left_usd: number | null;
}

export interface DaySpend {
  day: string;
  limit_usd: number | null;
  spent_usd: number;
  held_usd: number;
  unresolved_usd: number;
  left_usd: number | null;
  api_calls: number;
  tokens_in: number;
  tokens_out: number;
}

export interface Difference {
  what: string;
  one: unknown;
  other: unknown;
}

export interface Edge {
  id: string;
  source: string;
  sourceHandle?: string | null;
  target: string;
  targetHandle?: string | null;
  data: EdgeData;
}

export interface EdgeData {
  channel: "flow" | "link";
}

export interface ErrorPolicyData {
  on_error?: "fail" | "retry" | "skip" | "fallback" | "continue";
  retry_count?: number;
  retry_delay_ms?: number;
  retry_backoff?: number;
  retry_jitter?: number;
  timeout_ms?: number | null;
  fallback_value?: unknown;
  fallback_handle?: string | null;
}

export interface ErrorShown {
  error: penstock__server__schemas__ErrorFacts;
}

export interface EventShown {
  seq: number;
  at_ms: number;
  type: string;
  data: Record<string, unknown>;
}

export interface FailedData {
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  unresolved_usd?: number | null;
  unknown_costs?: number | null;
  error: string;
  message: string;
  node_id?: string | null;
}

export interface FindingShown {
  name: string;
  state: "ok" | "missing" | "broken";
  found: string;
  advice: string;
}

export interface GatewayKeyShown {
  team: string;
  daily_usd: number | null;
  max_cost_usd: number | null;
  models: string[];
  today: DaySpend | null;
}

export interface Grant {
  limits: Limits;
}

export interface GrantedData {
  limits: Record<string, unknown>;
  by: string;
  grant_id: string;
}

export interface GraphDiff {
  graph_id: string;
  before: GraphSummary;
  after: GraphSummary;
  changes: ChangeShown[];
  truncated: boolean;
}

export interface GraphListed {
  id: string;
  version: number;
  owner: string;
  name: string;
  digest: string;
  created_ms: number;
  is_archived: boolean;
  saved_by?: string;
  note?: string;
  valid: boolean;
  chat: boolean;
  made_for_chat: boolean;
  source: "document" | "program";
}

export interface GraphPage {
  graphs: GraphListed[];
  next: string | null;
}

export interface GraphShown {
  id: string;
  version: number;
  owner: string;
  name: string;
  digest: string;
  created_ms: number;
  is_archived: boolean;
  saved_by?: string;
  note?: string;
  valid: boolean;
  chat: boolean;
  made_for_chat: boolean;
  source: "document" | "program";
  problems: ProblemShown[];
  document: Record<string, unknown>;
}

export interface GraphSummary {
  id: string;
  version: number;
  owner: string;
  name: string;
  digest: string;
  created_ms: number;
  is_archived: boolean;
  saved_by?: string;
  note?: string;
}

export interface GraphVersion {
  name?: string | null;
  document: Record<string, unknown>;
  note?: string;
  source?: string | null;
  expected_version?: number | null;
}

export interface Halt {
  whose: "run" | "owner" | "all" | "node";
  budget: string;
  unit?: string | null;
  limit?: number | null;
  used?: number | null;
  node_id?: string | null;
}

export interface HaltedData {
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  unresolved_usd?: number | null;
  unknown_costs?: number | null;
  stop_reason: string;
  message: string;
  budget?: string | null;
  unit?: string | null;
  limit?: number | null;
  used?: number | null;
  held?: number | null;
  asked?: number | null;
  momentary?: boolean | null;
  whose?: "run" | "owner" | "all" | "node" | null;
  node_id?: string | null;
}

export interface HandleShown {
  name: string;
  type: string;
  channel: "flow" | "link";
  many: "one" | "list" | "first";
  required: boolean;
}

export interface HostShown {
  worker: string;
  now_ms: number;
  running: number;
  waiting: number;
  queued: number;
  streams: number;
  cpu_s: number;
  max_memory_bytes: number | null;
  totals: Record<string, number>;
  workers: WorkerShown[];
  database: DatabaseShown;
}

export interface KeyRunList {
  token_id: string;
  day: string;
  runs: KeyRunShown[];
  next?: string | null;
}

export interface KeyRunShown {
  run: string;
  spent_usd: number;
  held_usd: number;
  unresolved_usd: number;
  api_calls: number;
  tokens_in: number;
  tokens_out: number;
}

export interface LastMessage {
  message_id: string;
  role: string;
  content: string;
  at_ms: number;
  state: string | null;
}

export interface LayoutChange {
  positions: Record<string, NodePosition | null>;
}

export interface LayoutShown {
  positions: Record<string, NodePosition>;
}

export interface LimitData {
  stop_reason: string;
  message: string;
  budget: string | null;
  unit: string | null;
  limit: number | null;
  used: number | null;
  held: number | null;
  asked: number | null;
  unresolved: number | null;
  momentary: boolean;
  whose: "run" | "owner" | "all" | "node" | null;
  call_id: string | null;
  name: string;
  node_id: string | null;
  cause: boolean;
}

export interface LimitEvent {
  seq: number;
  at_ms: number;
  type: "limit";
  data: LimitData;
}

export interface Limits {
  max_cost_usd?: number | string | null;
  max_steps?: number | null;
  max_tokens?: number | null;
  max_api_calls?: number | null;
  max_retries?: number | null;
  timeout_s?: number | null;
}

export interface LiveUsage {
  spent_usd: number;
  held_usd: number;
  unresolved_usd: number;
  tokens: number;
  api_calls: number;
  steps: number | null;
}

export interface Me {
  name: string;
  role: string;
  until: string | null;
  default_limits: Record<string, unknown>;
  ceilings: Record<string, unknown>;
}

export interface ModelShown {
  id: string;
  model: string;
  is_offered: boolean;
  provider: string | null;
  priced: boolean;
  price: PriceFigures | null;
  key: "set" | "missing" | null;
  graphs: number;
  used_by: UsingGraph[];
}

export interface MoneyInProgress {
  runs: number;
  spent_usd: number;
  held_usd: number;
}

export interface MoneyShown {
  by: ("day" | "model" | "graph" | "owner" | "node")[];
  since: string;
  until: string;
  time_zone: "UTC";
  sums: MoneySum[];
  is_truncated: boolean;
  total: MoneySum;
  in_progress: MoneyInProgress;
  unresolved: MoneyUnresolved;
}

export interface MoneySum {
  day?: string | null;
  model?: string | null;
  graph_id?: string | null;
  owner?: string | null;
  node?: string | null;
  runs: number | null;
  calls: number;
  cost_usd: number | null;
  cost_nanos: number;
  tokens_in: number;
  tokens_out: number;
  unknown_costs: number;
}

export interface MoneyUnresolved {
  runs: number;
  held_usd: number;
}

export interface NewAnswer {
  user_tools?: string[];
  limits?: Limits | null;
  run_id?: string | null;
}

export interface NewMessage {
  content: string;
  parent_id?: string | null;
  attachments?: string[];
  user_tools?: string[];
  limits?: Limits | null;
  run_id?: string | null;
}

export interface NewRun {
  graph_id: string;
  version?: number | null;
  input?: unknown;
  limits?: Limits | null;
  run_id?: string | null;
}

export interface NewToken {
  name: string;
  role?: "viewer" | "user" | "admin";
  expires?: string | null;
  note?: string;
  another?: boolean;
  kind?: "user" | "gateway";
  daily_usd?: number | string | null;
  max_cost_usd?: number | string | null;
  models?: string[];
  team?: string;
}

export interface Node {
  id: string;
  type: string;
  position?: Position;
  data?: NodeData;
}

export interface NodeCancelledEvent {
  seq: number;
  at_ms: number;
  type: "node.cancelled";
  data: NodeEventData;
}

export interface NodeCompletedEvent {
  seq: number;
  at_ms: number;
  type: "node.completed";
  data: NodeEventData;
}

export interface NodeData {
  error_policy?: ErrorPolicyData | null;
  budget?: BudgetData | null;
}

export interface NodeErrorEvent {
  seq: number;
  at_ms: number;
  type: "node.error";
  data: NodeEventData;
}

export interface NodeEventData {
  node_id: string;
  node_type: string;
  replayed?: boolean | null;
  outputs?: Record<string, unknown> | null;
  finish_reason?: unknown;
  error?: string | null;
  message?: string | null;
  reason?: unknown;
}

export interface NodeHandlesShown {
  inputs: ResolvedHandleShown[];
  outputs: ResolvedHandleShown[];
}

export interface NodePosition {
  x: number;
  y: number;
}

export interface NodeProgressEvent {
  seq: number;
  at_ms: number;
  type: "node.progress";
  data: ProgressData;
}

export interface NodeSkippedEvent {
  seq: number;
  at_ms: number;
  type: "node.skipped";
  data: NodeEventData;
}

export interface NodeStartedEvent {
  seq: number;
  at_ms: number;
  type: "node.started";
  data: NodeEventData;
}

export interface NodeTypeShown {
  type: string;
  title: string;
  description: string;
  category: string;
  runs: boolean;
  inputs: HandleShown[] | null;
  outputs: HandleShown[] | null;
  data_schema: Record<string, unknown> | null;
}

export interface NodeTypes {
  node_types: NodeTypeShown[];
  conversions: string[][];
}

export interface OfferedModels {
  models: ModelShown[];
}

export interface PlaceShown {
  number: number;
  count: number;
  previous_id: string | null;
  next_id: string | null;
}

export interface PlacedMessage {
  id: string;
  parent_id: string | null;
  role: string;
  content: string;
  at_ms: number;
  data: Record<string, unknown>;
  place: PlaceShown;
}

export interface Position {
  x: number;
  y: number;
}

export interface PriceFigures {
  source: "reported" | "registered" | "genai-prices" | "assumed" | "unknown";
  input_usd_per_mtok: number | null;
  output_usd_per_mtok: number | null;
  cached_input_usd_per_mtok: number | null;
  request_usd: number;
  has_tiers: boolean;
}

export interface PriceList {
  prices: PriceShown[];
  unknown: "refuse" | "assume" | "count";
}

export interface PriceShown {
  source: "reported" | "registered" | "genai-prices" | "assumed" | "unknown";
  input_usd_per_mtok: number | null;
  output_usd_per_mtok: number | null;
  cached_input_usd_per_mtok: number | null;
  request_usd: number;
  has_tiers: boolean;
  model: string;
  offered_as: string[];
  provider: string | null;
}

export interface PriceUnknownData {
  model: string | null;
  message: string;
}

export interface PriceUnknownEvent {
  seq: number;
  at_ms: number;
  type: "price.unknown";
  data: PriceUnknownData;
}

export interface ProblemShown {
  code: string;
  path: string;
  message: string;
}

export interface ProgramChangedData {
  node_id: string;
  program?: unknown;
  message?: unknown;
}

export interface ProgramChangedEvent {
  seq: number;
  at_ms: number;
  type: "program.changed";
  data: ProgramChangedData;
}

export interface ProgressData {
  node_id: string;
  node_type: string;
  replayed?: boolean | null;
  name: string;
  data: unknown;
}

export interface QueuedData {
  missing?: string[] | null;
}

export interface Readiness {
  status: "ready" | "degraded";
  unreadable?: Record<string, number>;
  rows?: UnreadableRow[] | null;
}

export interface ResolveBill {
  call_id: string;
  by?: string | null;
  cost_usd: number | string;
  tokens_in?: number;
  tokens_out?: number;
}

export interface ResolvedHandleShown {
  name: string;
  type: string;
  channel: "flow" | "link";
  many: "one" | "list" | "first";
  required: boolean;
  declared: boolean;
}

export interface RunBills {
  run_id: string;
  graph_id: string;
  owner: string;
  status: "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";
  created_ms: number;
  ended_ms: number | null;
  unresolved_usd: number;
  unknown_costs: number;
  bills: BillShown[];
  unknown: UnknownCost[];
}

export interface RunCancelledEvent {
  seq: number;
  at_ms: number;
  type: "run.cancelled";
  data: CancelledData;
}

export interface RunCompletedEvent {
  seq: number;
  at_ms: number;
  type: "run.completed";
  data: CompletedData;
}

export interface RunDiff {
  differences: Difference[];
}

export type RunEvent = RunQueuedEvent | RunStartedEvent | RunResumedEvent | RunParkedEvent | RunWaitingEvent | RunGrantedEvent | RunCompletedEvent | RunFailedEvent | RunHaltedEvent | RunCancelledEvent | ApprovalRequestedEvent | ApprovalAnsweredEvent | BillResolvedEvent | BillReleasedEvent | NodeStartedEvent | NodeCompletedEvent | NodeErrorEvent | NodeCancelledEvent | NodeSkippedEvent | NodeProgressEvent | TextDeltaEvent | ToolCallEvent | CallStartedEvent | CallWaitingEvent | CallEndedEvent | CallSettledEvent | LimitEvent | BudgetEvent | PriceUnknownEvent | ProgramChangedEvent;

export interface RunFailedEvent {
  seq: number;
  at_ms: number;
  type: "run.failed";
  data: FailedData;
}

export interface RunGrantedEvent {
  seq: number;
  at_ms: number;
  type: "run.granted";
  data: GrantedData;
}

export interface RunHaltedEvent {
  seq: number;
  at_ms: number;
  type: "run.halted";
  data: HaltedData;
}

export interface RunPage {
  runs: RunSummary[];
  next: string | null;
  total: number | null;
}

export interface RunParkedEvent {
  seq: number;
  at_ms: number;
  type: "run.parked";
  data: UsageData;
}

export interface RunQueuedEvent {
  seq: number;
  at_ms: number;
  type: "run.queued";
  data: QueuedData;
}

export interface RunResumedEvent {
  seq: number;
  at_ms: number;
  type: "run.resumed";
  data: StartData;
}

export interface RunShown {
  id: string;
  owner: string;
  graph_id: string;
  graph_version: number;
  limits: Record<string, unknown>;
  origin: Record<string, unknown>;
  status: "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";
  created_ms: number;
  started_ms: number | null;
  ended_ms: number | null;
  epoch: number;
  stop_reason: string | null;
  error: string | null;
  cost_usd: number | null;
  cost_nanos: number;
  unresolved_usd: number;
  unknown_costs: number;
  tokens_in: number;
  tokens_out: number;
  live?: LiveUsage | null;
  input: unknown;
  output: unknown;
  last_seq: number;
  halted_by: Halt | null;
  advice: AdviceShown[];
}

export interface RunStartedEvent {
  seq: number;
  at_ms: number;
  type: "run.started";
  data: StartData;
}

export interface RunSummary {
  id: string;
  owner: string;
  graph_id: string;
  graph_version: number;
  limits: Record<string, unknown>;
  origin: Record<string, unknown>;
  status: "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";
  created_ms: number;
  started_ms: number | null;
  ended_ms: number | null;
  epoch: number;
  stop_reason: string | null;
  error: string | null;
  cost_usd: number | null;
  cost_nanos: number;
  unresolved_usd: number;
  unknown_costs: number;
  tokens_in: number;
  tokens_out: number;
  live?: LiveUsage | null;
}

export interface RunTree {
  run_id: string;
  status: "queued" | "running" | "waiting" | "parked" | "completed" | "failed" | "halted" | "cancelled";
  epoch: number;
  last_seq: number;
  base_ms: number;
  calls: number;
  truncated: boolean;
  kinds: string[];
  statuses: string[];
  strings: string[];
  stops: StopShown[];
  columns: TreeColumns;
}

export interface RunWaitingEvent {
  seq: number;
  at_ms: number;
  type: "run.waiting";
  data: WaitingData;
}

export interface Setting {
  name: string;
  section: "runs" | "money" | "storage" | "access" | "requests";
  title: string;
  value: unknown;
  unit: "" | "seconds" | "days" | "bytes" | "usd";
  option: string;
  is_default: boolean;
}

export interface SettingList {
  settings: Setting[];
}

export interface SpendShown {
  token_id: string;
  days: DaySpend[];
}

export interface StartData {
  epoch: number;
  replayed?: number | null;
  worked_ms?: number | null;
  lost?: number | null;
}

export type StopReason = "budget_exceeded" | "retry_budget_exceeded" | "circuit_open" | "step_limit_exceeded" | "timeout" | "aborted" | "provider_rate_limit" | "provider_error" | "token_limit_exceeded" | "api_call_limit_exceeded" | "hook_denied" | "price_unknown" | "diverged" | "ledger_unavailable";

export interface StopShown {
  reason: StopReason;
  message: string;
  budget: string | null;
  whose: "run" | "owner" | "all" | "node" | null;
  unit: string | null;
  limit: number | null;
  used: number | null;
  held: number | null;
  asked: number | null;
  unresolved: number | null;
  momentary: boolean;
  cause?: boolean;
}

export interface TextData {
  node_id: string;
  source: unknown;
  text: string;
}

export interface TextDeltaEvent {
  seq: number;
  at_ms: number;
  type: "text.delta";
  data: TextData;
}

export interface TokenList {
  tokens: TokenShown[];
  next?: string | null;
  needs_tokens: boolean;
}

export interface TokenShown {
  id: string;
  source: "database" | "environment";
  name: string;
  role: "viewer" | "user" | "admin";
  kind: "user" | "gateway";
  state: "active" | "expired" | "revoked";
  created_ms?: number | null;
  created_by?: string | null;
  expires?: string | null;
  revoked_ms?: number | null;
  revoked_by?: string | null;
  last_used_ms?: number | null;
  note?: string;
  is_yours?: boolean;
  gateway?: GatewayKeyShown | null;
}

export interface ToolCallData {
  node_id: string;
  source: unknown;
  call: unknown;
}

export interface ToolCallEvent {
  seq: number;
  at_ms: number;
  type: "tool.call";
  data: ToolCallData;
}

export interface ToolList {
  tools: string[];
}

export interface ToolShape {
  tool: string;
  parameters: Record<string, unknown>;
}

export interface TreeColumns {
  call: number[];
  parent: number[];
  kind: number[];
  name: number[];
  node: number[];
  node_type: number[];
  model: number[];
  start_ms: number[];
  end_ms: number[];
  status: number[];
  cost_nanos: number[];
  tokens_in: number[];
  tokens_out: number[];
  attempt: number[];
  stop: number[];
  flags: number[];
}

export interface TurnShown {
  chat_id: string;
  run_id: string;
  user_message_id: string | null;
  message_id: string;
}

export interface UnitShown {
  unit: "usd" | "steps" | "tokens" | "api calls" | "retries";
  spent: number;
  held: number;
  unresolved: number;
  waiting: number;
  limit: number | null;
  left: number | null;
}

export interface UnknownCost {
  node: string;
  model: string;
  calls: number;
}

export interface UnreadableRow {
  table: string;
  key: string;
  why: string;
}

export interface UsageData {
  cost_usd: number | null;
  tokens_in: number;
  tokens_out: number;
  unresolved_usd?: number | null;
  unknown_costs?: number | null;
}

export interface UsingGraph {
  id: string;
  name: string;
  version: number;
}

export interface Validity {
  valid: boolean;
  problems: ProblemShown[];
  handles?: Record<string, NodeHandlesShown> | null;
}

export interface WaitingData {
  approval_id: string;
  idle?: boolean | null;
}

export interface WorkerShown {
  name: string;
  runs: number;
  lease_until_ms: number;
  is_this: boolean;
}

export interface penstock__server__schemas__ErrorFacts {
  code: string;
  message: string;
  path?: string | null;
  details?: Record<string, unknown>[] | null;
}
