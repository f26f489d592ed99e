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

export interface ApprovalPage {
  approvals: ApprovalShown[];
  next: string | null;
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
}

export interface AttachmentShown {
  id: string;
  name: string;
  media_type: string;
  size: number;
  created_ms: number;
}

export interface BillList {
  bills: BillShown[];
  unresolved_usd: number;
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

export interface CancelShown {
  result: "cancelled" | "already_cancelled" | "remembered" | "ended";
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

export interface ErrorShown {
  error: penstock__server__schemas__ErrorFacts;
}

export interface EventShown {
  seq: number;
  at_ms: number;
  type: string;
  data: Record<string, unknown>;
}

export interface Grant {
  limits: Limits;
}

export interface GraphListed {
  id: string;
  version: number;
  owner: string;
  name: string;
  digest: string;
  created_ms: number;
  is_archived: boolean;
  valid: boolean;
  chat: boolean;
  source: "document" | "program";
}

export interface GraphPage {
  graphs: GraphListed[];
  next: string | null;
}

export interface Halt {
  whose: "run" | "owner" | "all" | "node";
  budget: string;
  unit?: string | null;
  limit?: number | null;
  used?: number | null;
  node_id?: string | null;
}

export interface LastMessage {
  message_id: string;
  role: string;
  content: string;
  at_ms: number;
  state: string | null;
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

export interface ResolveBill {
  call_id: string;
  by?: string | null;
  cost_usd: number | string;
  tokens_in?: number;
  tokens_out?: number;
}

export interface RunPage {
  runs: RunSummary[];
  next: string | null;
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

export interface TurnShown {
  chat_id: string;
  run_id: string;
  user_message_id: string | null;
  message_id: string;
}

export interface penstock__server__schemas__ErrorFacts {
  code: string;
  message: string;
  path?: string | null;
  details?: Record<string, unknown>[] | null;
}
