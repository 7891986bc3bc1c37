// Captures and graphs of the emulated driver: what a capturing stream is asked for is kept with copies of its arguments, and done by
// each launch of the graph, in the stream's order. One part of libcuda.cpp.
#pragma once

typedef std::vector<std::shared_ptr<Node>> Nodes;
// What is ready to be launched has nodes of its own, by those of the graph that it was made of.
struct Ready {
    Nodes source;
    std::shared_ptr<Nodes> nodes; // a launch under way outlives it, and sees no change
};
static std::set<Node*> living; // of graphs that aren't destroyed
enum { RELAXED_CAPTURE = 2, CAPTURE_ACTIVE = 1, CAPTURE_INVALID = 2 };

API cuStreamBeginCapture_v2(void* stream, int mode) {
    CALLED("cuStreamBeginCapture");
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
// The capture ends, whatever became of it.
API cuStreamEndCapture(void* stream, void** graph) {
    *graph = nullptr;
    Stream* s = (Stream*)stream;
    if (!s->capture) return CAPTURE_UNMATCHED;
    Nodes nodes = std::move(*s->capture);
    s->capture = nullptr;
    LOCKED;
    MAY_FAIL("cuStreamEndCapture");
    if (s->invalid) return CAPTURE_INVALIDATED;
    for (auto& node : nodes) living.insert(node.get());
    *graph = new Nodes(nodes);
    return SUCCESS;
}
// What comes next depends on the node that was captured last.
API cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph, void* const** nodes, size_t* count) {
    static thread_local void* last;
    Stream* s = (Stream*)stream;
    *status = !s->capture ? 0 : s->invalid ? CAPTURE_INVALID : CAPTURE_ACTIVE;
    if (*status != CAPTURE_ACTIVE) return SUCCESS; // nothing else is written
    *id = 1, *graph = nullptr;
    *count = s->capture->empty() ? 0 : 1;
    last = *count ? s->capture->back().get() : nullptr;
    *nodes = &last;
    return SUCCESS;
}
API cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
    CALLED("cuGraphInstantiate");
    {
        LOCKED;
        MAY_FAIL("cuGraphInstantiate");
    }
    if (!graph || flags) return INVALID_VALUE;
    Nodes& source = *(Nodes*)graph;
    *ready = new Ready{source, std::make_shared<Nodes>(source)};
    return SUCCESS;
}
// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNode {
    void* function;
    Shape shape;
    void **given, **extra;
    void *kernel, *context;
};
API cuGraphExecKernelNodeSetParams_v2(void* ready, void* node, const KernelNode* wanted) {
    CALLED("cuGraphExecKernelNodeSetParams");
    LOCKED;
    MAY_FAIL("cuGraphExecKernelNodeSetParams");
    Ready* r = (Ready*)ready;
    auto found = std::find_if(r->source.begin(), r->source.end(), [&](auto& own) { return own.get() == node; });
    if (found == r->source.end() || !living.count((Node*)node) || !(*found)->is_kernel || wanted->extra) return INVALID_VALUE;
    std::function<void()> body = bound((Kernel*)wanted->function, wanted->shape, wanted->given);
    if (!body) return INVALID_VALUE;
    r->nodes = std::make_shared<Nodes>(*r->nodes);
    (*r->nodes)[(size_t)(found - r->source.begin())] = std::make_shared<Node>(Node{with_lock(body), true});
    return SUCCESS;
}
API cuGraphLaunch(void* ready, void* stream) {
    CALLED("cuGraphLaunch");
    NOT_CAPTURED(stream);
    {
        LOCKED;
        MAY_FAIL("cuGraphLaunch");
    }
    in_turn(stream, [nodes = ((Ready*)ready)->nodes] {
        for (auto& node : *nodes) node->work();
    });
    return SUCCESS;
}
API cuGraphExecDestroy(void* ready) {
    CALLED("cuGraphExecDestroy");
    delete (Ready*)ready;
    return SUCCESS;
}
API cuGraphDestroy(void* graph) {
    CALLED("cuGraphDestroy");
    LOCKED;
    for (auto& node : *(Nodes*)graph) living.erase(node.get());
    delete (Nodes*)graph;
    return SUCCESS;
}
