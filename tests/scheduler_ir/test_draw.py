"""Drawings as text."""

import re

from hypothesis import given

from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.nodes import NodeType
from tests.scheduler_ir.made import graphs, node

GRAPH = IRGraph([
    node("p", NodeType.PREFILL_CHUNK, "", "kv logits", "gpu0", request=7, start=4, tokens=8),
    node("move", NodeType.KV_TRANSFER, "kv", "there",
         request=7, start=0, tokens=12, src_instance="a", dst_instance="b", bytes=96),
    node('s"\\\n', NodeType.DECODE_STEP, "logits kv there", "", 'gpu"1', requests=[1, 2, 3, 4, 5]),
    node("c", NodeType.COLLECTIVE, op="all_reduce", bytes=3, group="tp"),
])  # fmt: skip


def test_graphviz():
    assert GRAPH.to_graphviz('a "name"') == r'''digraph "a \"name\"" {
  rankdir=LR;
  node [shape=box];
  subgraph cluster_0 {
    label="gpu0";
    n0 [label="p\nprefill_chunk\nrequest 7\ntokens 4..12"];
  }
  n1 [label="move\nkv_transfer\nrequest 7\ntokens 0..12\na to b\n96 bytes"];
  n3 [label="c\ncollective\nall_reduce in tp\n3 bytes"];
  subgraph cluster_2 {
    label="gpu\"1";
    n2 [label="s\"\\ \ndecode_step\n5 requests"];
  }
  n0 -> n1 [label="kv"];
  n0 -> n2 [label="2 values"];
  n1 -> n2 [label="there"];
}
'''


def test_mermaid():
    assert GRAPH.to_mermaid() == """flowchart LR
  subgraph d0["gpu0"]
    n0["p<br/>prefill_chunk<br/>request 7<br/>tokens 4..12"]
  end
  n1["move<br/>kv_transfer<br/>request 7<br/>tokens 0..12<br/>a to b<br/>96 bytes"]
  n3["c<br/>collective<br/>all_reduce in tp<br/>3 bytes"]
  subgraph d2["gpu#quot;1"]
    n2["s#quot;#92; <br/>decode_step<br/>5 requests"]
  end
  n0 -->|"kv"| n1
  n0 -->|"2 values"| n2
  n1 -->|"there"| n2
"""


@given(graphs())
def test_no_name_breaks_out_of_its_label(graph: IRGraph):
    dot = re.sub(r'"(?:[^"\\\n]|\\.)*"', "TEXT", graph.to_graphviz())
    line = r"(subgraph cluster_\d+ \{|label=TEXT;|n\d+ (-> n\d+ )?\[label=TEXT\];|\}|rankdir=LR;|node \[shape=box\];)"
    assert all(re.fullmatch(line, each.strip()) for each in dot.strip().split("\n")[1:])
    assert dot.count("[label") == len(graph) + dot.count("->")
    text = re.sub(r'"[^"\n]*"', "TEXT", graph.to_mermaid())
    line = r"(subgraph d\d+\[TEXT\]|n\d+\[TEXT\]|n\d+ -->\|TEXT\| n\d+|end|flowchart LR)"
    assert all(re.fullmatch(line, each.strip()) for each in text.strip().split("\n"))
