from penstock.containment.limits import ExecutionConfig as ExecutionConfig
from penstock.containment.safety import ChainMetadata as ChainMetadata
from penstock.runtime.calls import WrapOptions as WrapOptions
from penstock.runtime.context import ExecutionContext as ExecutionContext
from penstock.runtime.snapshot import ContextSnapshot as ContextSnapshot
from penstock.runtime.snapshot import NodeRecord as NodeRecord
from penstock.tracing.execution_graph import ExecutionGraph as ExecutionGraph
