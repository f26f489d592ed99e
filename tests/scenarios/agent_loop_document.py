"""The code blocks of the design document on the agent loop, in Go, as written there."""

CORE_TYPES = """\
type ExecutionContext struct {
    // User's custom loop data (retained as interface for extensibility)
    data LoopData

    // Current position (auto-tracked)
    iteration int
    depth     int // nesting level

    // All trace events (append-only log)
    events []TraceEvent

    // Aggregates (auto-updated when certain events are traced)
    stats ExecutionStats

    // Nesting support
    parent   *ExecutionContext
    children []*ExecutionContext
    name     string // "main", "compaction", "tool:search", etc.

    // Timing
    startTime time.Time
    endTime   time.Time

    // Termination
    terminationReason TerminationReason
}

type ExecutionStats struct {
    TotalInputTokens   int
    TotalOutputTokens  int
    TotalCost          float64
    InputTokensByModel  map[string]int
    OutputTokensByModel map[string]int
    CostByModel         map[string]float64
    ToolCallCount       int
    ToolCallsByName     map[string]int
}

type TerminationReason string

const (
    TerminationSuccess         TerminationReason = "success"
    TerminationMaxIterations   TerminationReason = "max_iterations"
    TerminationError           TerminationReason = "error"
    TerminationContextCanceled TerminationReason = "context_canceled"
    TerminationHookAbort       TerminationReason = "hook_abort"
)
"""
CONTEXT_METHODS = """\
// Trace records an event and auto-updates aggregates based on event type.
func (ctx *ExecutionContext) Trace(event TraceEvent)

// TraceCustom is a convenience method for custom trace events.
func (ctx *ExecutionContext) TraceCustom(name string, data map[string]any)

// Data returns the user's LoopData.
func (ctx *ExecutionContext) Data() LoopData

// Iteration returns the current iteration number (1-indexed).
func (ctx *ExecutionContext) Iteration() int

// Stats returns the current aggregated stats.
func (ctx *ExecutionContext) Stats() ExecutionStats

// Events returns all recorded trace events.
func (ctx *ExecutionContext) Events() []TraceEvent

// --- Iteration management (called by Executor) ---

// StartIteration begins a new iteration, recording an IterationStartTrace.
func (ctx *ExecutionContext) StartIteration()

// EndIteration completes the current iteration, recording an IterationEndTrace.
func (ctx *ExecutionContext) EndIteration(action LoopAction)

// --- Nesting ---

// SpawnChild creates a child ExecutionContext for nested agent loops.
// The child is automatically linked to the parent.
func (ctx *ExecutionContext) SpawnChild(name string, data LoopData) *ExecutionContext

// CompleteChild finalizes a child context and attaches it to the parent.
// This should be called via defer after SpawnChild.
func (ctx *ExecutionContext) CompleteChild(child *ExecutionContext)

// Parent returns the parent context, or nil if this is the root.
func (ctx *ExecutionContext) Parent() *ExecutionContext

// Children returns all child contexts.
func (ctx *ExecutionContext) Children() []*ExecutionContext

// Name returns the name of this execution context.
func (ctx *ExecutionContext) Name() string

// Depth returns the nesting depth (0 for root).
func (ctx *ExecutionContext) Depth() int
"""
LOOP_DATA = """\
type LoopData interface {
    // GetOriginalInput returns the original input that started the agent loop.
    GetOriginalInput() []ContentPart

    // GetIterationHistory returns all Iterations recorded, including compacted ones.
    GetIterationHistory() []*Iteration

    // AddIterationHistory adds a new Iteration to the full history only.
    AddIterationHistory(iter *Iteration)

    // GetIterations returns Iterations that will be used in the next iteration.
    // When compaction happens, some earlier iterations may be removed from this slice,
    // but they are preserved in GetIterationHistory.
    GetIterations() []*Iteration

    // SetIterations sets the iterations to be used in next iteration.
    SetIterations([]*Iteration)
}

// Iteration represents a single iteration's message content (renamed from IterationInfo).
type Iteration struct {
    Messages []MessageContent
}
"""
BASE_TYPES = """\
// TraceEvent is the marker interface for all trace events.
type TraceEvent interface {
    traceEvent() // marker method
}

// BaseTrace contains common fields auto-populated by ExecutionContext.Trace().
type BaseTrace struct {
    Timestamp time.Time
    Iteration int
    Depth     int
}
"""
WELL_KNOWN_TRACES = """\
// ModelCallTrace records an LLM API call.
// Auto-updates: TotalInputTokens, TotalOutputTokens, TotalCost, *ByModel maps.
type ModelCallTrace struct {
    BaseTrace
    Model        string
    InputTokens  int
    OutputTokens int
    Cost         float64
    Duration     time.Duration
    Error        error
}

// ToolCallTrace records a tool execution.
// Auto-updates: ToolCallCount, ToolCallsByName.
type ToolCallTrace struct {
    BaseTrace
    ToolName string
    Input    any
    Output   any
    Duration time.Duration
    Error    error
}

// IterationStartTrace marks the beginning of an iteration.
type IterationStartTrace struct {
    BaseTrace
}

// IterationEndTrace marks the end of an iteration.
type IterationEndTrace struct {
    BaseTrace
    Duration time.Duration
    Action   LoopAction
}

// ChildSpawnTrace records when a child ExecutionContext is created.
type ChildSpawnTrace struct {
    BaseTrace
    ChildName string
}

// ChildCompleteTrace records when a child ExecutionContext completes.
type ChildCompleteTrace struct {
    BaseTrace
    ChildName         string
    TerminationReason TerminationReason
    Duration          time.Duration
}
"""
CUSTOM_TRACE = """\
// CustomTrace allows recording arbitrary trace data.
type CustomTrace struct {
    BaseTrace
    Name string
    Data map[string]any
}
"""
MODEL = """\
type Model interface {
    Generate(
        ctx context.Context,
        execCtx *ExecutionContext,
        messages []MessageContent,
    ) (*ModelResponse, error)
}

// Implementation automatically traces:
func (m *modelImpl) Generate(
    ctx context.Context,
    execCtx *ExecutionContext,
    messages []MessageContent,
) (*ModelResponse, error) {
    start := time.Now()
    resp, err := m.underlying.Generate(ctx, messages)

    // Automatic tracing - user doesn't think about this
    execCtx.Trace(ModelCallTrace{
        Model:        m.name,
        InputTokens:  resp.Usage.InputTokens,
        OutputTokens: resp.Usage.OutputTokens,
        Cost:         m.calculateCost(resp.Usage),
        Duration:     time.Since(start),
        Error:        err,
    })

    return resp, err
}
"""
TOOL_CHAIN = """\
type ToolChain interface {
    Execute(
        ctx context.Context,
        execCtx *ExecutionContext,
        call ToolCall,
    ) (*ToolResult, error)
}

// Implementation automatically traces tool calls.
"""
OUTPUT_FORMAT = """\
type TextOutputFormat interface {
    Parse(
        ctx context.Context,
        execCtx *ExecutionContext,
        output string,
    ) (*ParsedOutput, error)
}
"""
AGENT_LOOP = """\
type AgentLoop[Data LoopData] interface {
    // Next performs one iteration of the agent loop (renamed from Iterate).
    Next(ctx context.Context, execCtx *ExecutionContext) *AgentLoopResult
}

type AgentLoopResult struct {
    Action     LoopAction
    NextPrompt string       // Only set when Action is LAContinue
    Result     []ContentPart // Only set when Action is LATerminate
}
"""
HOOKS = """\
type Hook interface {
    Fire(ctx context.Context, execCtx *ExecutionContext, event HookEvent) error
}

type HookEvent interface {
    hookEvent() // marker method
}

type BeforeIterationEvent struct {
    Iteration int
}

type AfterIterationEvent struct {
    Iteration int
    Result    *AgentLoopResult
    Duration  time.Duration
}

type BeforeExecutionEvent struct{}

type AfterExecutionEvent struct {
    Result            []ContentPart
    TerminationReason TerminationReason
    Error             error
}
"""
COMPACTION = """\
func (loop *ReActLoop) Next(
    ctx context.Context,
    execCtx *ExecutionContext,
) *AgentLoopResult {
    // ... normal iteration logic ...

    if needsCompaction {
        compactedIterations, err := loop.runCompaction(ctx, execCtx)
        if err != nil {
            return &AgentLoopResult{Action: LATerminate, Error: err}
        }
        execCtx.Data().SetIterations(compactedIterations)
    }

    // ... continue with iteration ...
}

func (loop *ReActLoop) runCompaction(
    ctx context.Context,
    execCtx *ExecutionContext,
) ([]*Iteration, error) {
    // Create child context - defer ensures CompleteChild is always called
    childData := NewCompactionLoopData(execCtx.Data())
    childCtx := execCtx.SpawnChild("compaction", childData)
    defer execCtx.CompleteChild(childCtx)

    // Run compaction agent with the child context
    result, err := loop.executor.Execute(ctx, childCtx, loop.compactionAgent)
    if err != nil {
        return nil, err
    }

    return extractCompactedIterations(result), nil
}
"""
TREE = """\
ExecutionContext "main"
├── IterationStartTrace {iteration: 1}
├── ModelCallTrace {model: "claude-3", tokens: 1500}
├── IterationEndTrace {iteration: 1, action: continue}
├── IterationStartTrace {iteration: 2}
├── ModelCallTrace {model: "claude-3", tokens: 2000}
├── ToolCallTrace {tool: "search", duration: 500ms}
├── IterationEndTrace {iteration: 2, action: continue}
├── IterationStartTrace {iteration: 3}
├── ModelCallTrace {model: "claude-3", tokens: 800}
├── ChildSpawnTrace {name: "compaction"}
│   └── ExecutionContext "compaction" (child)
│       ├── IterationStartTrace {iteration: 1}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 3000}
│       ├── IterationEndTrace {iteration: 1, action: continue}
│       ├── IterationStartTrace {iteration: 2}
│       ├── ModelCallTrace {model: "claude-3-haiku", tokens: 500}
│       └── IterationEndTrace {iteration: 2, action: terminate}
├── ChildCompleteTrace {name: "compaction", reason: success}
├── IterationEndTrace {iteration: 3, action: continue}
├── IterationStartTrace {iteration: 4}
├── ModelCallTrace {model: "claude-3", tokens: 1200}
└── IterationEndTrace {iteration: 4, action: terminate}

Stats (auto-aggregated, includes children):
  TotalInputTokens: 7000
  TotalOutputTokens: ...
  InputTokensByModel: {"claude-3": 3500, "claude-3-haiku": 3500}
  ToolCallCount: 1
  ToolCallsByName: {"search": 1}
"""
EXECUTOR = """\
func (e *Executor[Data]) Execute(
    ctx context.Context,
    data Data,
) (*ExecutionResult, error) {
    execCtx := NewExecutionContext("main", data)

    // Fire before execution hook
    if err := e.hooks.Fire(ctx, execCtx, BeforeExecutionEvent{}); err != nil {
        return nil, err
    }

    for {
        execCtx.StartIteration()

        // Fire before iteration hook
        if err := e.hooks.Fire(ctx, execCtx, BeforeIterationEvent{
            Iteration: execCtx.Iteration(),
        }); err != nil {
            execCtx.EndIteration(LATerminate)
            break
        }

        start := time.Now()
        result := e.agentLoop.Next(ctx, execCtx)
        duration := time.Since(start)

        execCtx.EndIteration(result.Action)

        // Fire after iteration hook
        if err := e.hooks.Fire(ctx, execCtx, AfterIterationEvent{
            Iteration: execCtx.Iteration(),
            Result:    result,
            Duration:  duration,
        }); err != nil {
            break
        }

        if result.Action == LATerminate {
            break
        }

        // Check max iterations, context cancellation, etc.
    }

    // Fire after execution hook
    e.hooks.Fire(ctx, execCtx, AfterExecutionEvent{
        Result:            execCtx.FinalResult(),
        TerminationReason: execCtx.TerminationReason(),
        Error:             execCtx.Error(),
    })

    return &ExecutionResult{
        Result:  execCtx.FinalResult(),
        Context: execCtx, // Full trace available here
        Error:   execCtx.Error(),
    }, nil
}
"""
BLOCKS = (
    CORE_TYPES,
    CONTEXT_METHODS,
    LOOP_DATA,
    BASE_TYPES,
    WELL_KNOWN_TRACES,
    CUSTOM_TRACE,
    MODEL,
    TOOL_CHAIN,
    OUTPUT_FORMAT,
    AGENT_LOOP,
    HOOKS,
    COMPACTION,
    TREE,
    EXECUTOR,
)
