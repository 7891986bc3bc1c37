// Stream capture and graphs of the emulated driver; included by libcuda.cpp. Calls to a capturing
// stream are recorded with copies of their arguments, and executed by each launch of the graph, in
// the stream's order.
#pragma once

typedef std::vector<std::shared_ptr<Node>> Nodes;
// An executable graph. Its nodes are copies of the source graph's nodes. An update finds a copy by
// its source node.
struct ExecutableGraph {
    Nodes source;
    std::shared_ptr<Nodes> nodes; // shared with launches in progress, which see no update
};
static std::set<Node*> live_nodes; // nodes of graphs that are not destroyed
enum { RELAXED_CAPTURE = 2, CAPTURE_ACTIVE = 1, CAPTURE_INVALID = 2 };

API cuStreamBeginCapture_v2(void* stream, int mode) {
    COUNT_CALL("cuStreamBeginCapture");
    {
        LOCKED;
        MAY_FAIL("cuStreamBeginCapture");
    }
    Stream* s = (Stream*)stream;
    if (s->capture || mode < 0 || mode > RELAXED_CAPTURE) return INVALID_VALUE;
    s->capture = std::make_shared<Nodes>();
    s->invalid = false;
    return SUCCESS;
}
// Ends the capture of a stream and returns the graph. Ends the capture even if it is invalid.
API cuStreamEndCapture(void* stream, void** graph) {
    *graph = nullptr;
    Stream* s = (Stream*)stream;
    if (!s->capture) return CAPTURE_UNMATCHED;
    Nodes nodes = std::move(*s->capture);
    s->capture = nullptr;
    LOCKED;
    MAY_FAIL("cuStreamEndCapture");
    if (s->invalid) return CAPTURE_INVALIDATED;
    for (auto& node : nodes) live_nodes.insert(node.get());
    *graph = new Nodes(nodes);
    return SUCCESS;
}
// Reports the node that was captured last, on which the next one depends.
static int capture_info(void* stream, int* status, unsigned long long* id, void** graph, void* const** nodes, size_t* count) {
    static thread_local void* last;
    Stream* s = (Stream*)stream;
    *status = !s->capture ? 0 : s->invalid ? CAPTURE_INVALID : CAPTURE_ACTIVE;
    if (*status != CAPTURE_ACTIVE) return SUCCESS; // the other outputs are not written
    *id = 1, *graph = nullptr;
    *count = s->capture->empty() ? 0 : 1;
    last = *count ? s->capture->back().get() : nullptr;
    *nodes = &last;
    return SUCCESS;
}
API cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, void* const** nodes, size_t* count) {
    return capture_info(stream, status, id, graph, nodes, count);
}
// Reports the same as version 2, and no data of edges.
API cuStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, void** graph, void* const** nodes, const void** edges, size_t* count) {
    *edges = nullptr;
    return capture_info(stream, status, id, graph, nodes, count);
}
API cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
    COUNT_CALL("cuGraphInstantiate");
    {
        LOCKED;
        MAY_FAIL("cuGraphInstantiate");
    }
    if (!graph || flags) return INVALID_VALUE;
    Nodes& source = *(Nodes*)graph;
    *ready = new ExecutableGraph{source, std::make_shared<Nodes>(source)};
    return SUCCESS;
}
// CUDA_KERNEL_NODE_PARAMS_v2: the kernel, grid and arguments of a graph node.
struct KernelNode {
    void* function;
    Shape shape;
    void **arguments, **extra;
    void *kernel, *context;
};
API cuGraphExecKernelNodeSetParams_v2(void* ready, void* node, const KernelNode* update) {
    COUNT_CALL("cuGraphExecKernelNodeSetParams");
    LOCKED;
    MAY_FAIL("cuGraphExecKernelNodeSetParams");
    ExecutableGraph* r = (ExecutableGraph*)ready;
    auto found = std::find_if(r->source.begin(), r->source.end(), [&](auto& candidate) { return candidate.get() == node; });
    if (found == r->source.end() || !live_nodes.count((Node*)node) || !(*found)->is_kernel || update->extra) return INVALID_VALUE;
    Stream* stream = (*found)->stream;
    std::function<void()> body = bind_launch((Kernel*)update->function, update->shape, update->arguments, stream);
    if (timeline()) timeline()->spend_on_host(costs::GRAPH_UPDATE_CALL);
    if (!body) return INVALID_VALUE;
    r->nodes = std::make_shared<Nodes>(*r->nodes);
    (*r->nodes)[(size_t)(found - r->source.begin())] = std::make_shared<Node>(Node{with_lock(body), true, stream});
    return SUCCESS;
}
API cuGraphLaunch(void* ready, void* stream) {
    COUNT_CALL("cuGraphLaunch");
    CHECK_STICKY;
    FORBID_IN_CAPTURE(stream);
    {
        LOCKED;
        MAY_FAIL("cuGraphLaunch");
    }
    if (timeline()) timeline()->spend_on_host(costs::GRAPH_CALL);
    enqueue(stream, [nodes = ((ExecutableGraph*)ready)->nodes] {
        for (auto& node : *nodes) node->work();
    });
    return SUCCESS;
}
API cuGraphExecDestroy(void* ready) {
    COUNT_CALL("cuGraphExecDestroy");
    delete (ExecutableGraph*)ready;
    return SUCCESS;
}
API cuGraphDestroy(void* graph) {
    COUNT_CALL("cuGraphDestroy");
    LOCKED;
    for (auto& node : *(Nodes*)graph) live_nodes.erase(node.get());
    delete (Nodes*)graph;
    return SUCCESS;
}
