//! Codes of errors about collectives between ranks.

codes! {
    COLLECTIVE_ABORTED: Failed = "collective-aborted" {
        summary: "A collective was aborted because a peer failed or the job is ending.",
        cause: "Another rank failed first; its failure is the root cause.",
        remedy: "Read the failure of the other rank.",
    }
}
