// Captures and graphs of the emulated driver: what a capturing stream is asked for is kept with copies of its arguments, and done by
// each launch of the graph, in the stream's order. One part of libcuda.cpp.
#pragma once

typedef std::shared_ptr<std::vector<std::function<void()>>> Works; // a launch under way outlives its graph
enum { RELAXED_CAPTURE = 2 };

API cuStreamBeginCapture_v2(void* stream, int mode) {
    CALLED("cuStreamBeginCapture");
    {
        LOCKED;
        MAY_FAIL("cuStreamBeginCapture");
    }
    Stream* s = (Stream*)stream;
    if (s->capture || mode < 0 || mode > RELAXED_CAPTURE) return INVALID_VALUE;
    s->capture = std::make_shared<std::vector<std::function<void()>>>();
    s->invalid = false;
    return SUCCESS;
}
// The capture ends, whatever became of it.
API cuStreamEndCapture(void* stream, void** graph) {
    *graph = nullptr;
    Stream* s = (Stream*)stream;
    if (!s->capture) return CAPTURE_UNMATCHED;
    Works works = std::move(s->capture);
    s->capture = nullptr;
    {
        LOCKED;
        MAY_FAIL("cuStreamEndCapture");
    }
    if (s->invalid) return CAPTURE_INVALIDATED;
    *graph = new Works(works);
    return SUCCESS;
}
API cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
    CALLED("cuGraphInstantiate");
    {
        LOCKED;
        MAY_FAIL("cuGraphInstantiate");
    }
    if (!graph || flags) return INVALID_VALUE;
    *ready = new Works(*(Works*)graph);
    return SUCCESS;
}
API cuGraphLaunch(void* ready, void* stream) {
    CALLED("cuGraphLaunch");
    NOT_CAPTURED(stream);
    {
        LOCKED;
        MAY_FAIL("cuGraphLaunch");
    }
    in_turn(stream, [works = *(Works*)ready] {
        for (auto& work : *works) work();
    });
    return SUCCESS;
}
API cuGraphExecDestroy(void* ready) {
    CALLED("cuGraphExecDestroy");
    delete (Works*)ready;
    return SUCCESS;
}
API cuGraphDestroy(void* graph) {
    CALLED("cuGraphDestroy");
    delete (Works*)graph;
    return SUCCESS;
}
