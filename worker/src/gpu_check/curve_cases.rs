//! The models, precisions and numbers of ranks for which `launch gpu-check` compares training
//! losses between a GPU and the CPU.

/// A model, described by keys of job.yaml, for which `launch gpu-check` compares the training
/// losses of a GPU and the CPU.
pub(super) struct CurveCase {
    pub(super) name: &'static str,
    /// The name of the case in the names of parts.
    pub(super) part_name: &'static str,
    pub(super) model: &'static str,
    pub(super) rest: &'static str,
}

/// The models for which `launch gpu-check` compares the losses of training on a GPU with those on
/// the CPU.
const CURVE_CASES: [CurveCase; 2] = [
    CurveCase {
        name: "Llama of the quickstart",
        part_name: "llama",
        model: "vocab_size: 257, hidden_size: 128, intermediate_size: 352, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=16 batch.micro=4",
    },
    CurveCase {
        name: "GPT-2, 4 layers of 256",
        part_name: "gpt2",
        model: "family: gpt2, vocab_size: 1000, hidden_size: 256, intermediate_size: 1024, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=8 batch.micro=2",
    },
];
/// Small models for the comparison of losses on a GPU and on the CPU, which tests of `launch
/// gpu-check` use.
const TINY_CURVE_CASES: [CurveCase; 1] = [CurveCase {
    name: "a tiny Llama",
    part_name: "llama",
    model: "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true",
    rest: "data.seq_len=6 batch.global=4 batch.micro=1",
}];

/// The precisions in which `launch gpu-check` compares GPU training with CPU training, each with
/// the largest accepted relative loss difference. In fp8 a difference in the last bit of a sum may
/// round an operand to another value, so the tolerance is larger.
pub(super) const CURVE_PRECISIONS: [(&str, f64); 4] =
    [("fp32", 1e-4), ("bf16", 2e-2), ("fp8", 5e-2), ("fp16", 1e-2)];

/// Returns the models for which `launch gpu-check` compares the losses of training on a GPU with
/// those on the CPU; small ones if `tiny` is set.
pub(super) fn select_curve_cases(tiny: bool) -> &'static [CurveCase] {
    if tiny { &TINY_CURVE_CASES } else { &CURVE_CASES }
}

/// The number of ranks for a training comparison of `launch gpu-check`, and whether these ranks
/// exchange data with NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CurveRanks {
    /// One rank.
    OneRank,
    /// Two ranks, and then four, which exchange data through host memory.
    SeveralRanks,
    /// One rank with NCCL.
    NcclOneRank,
    /// Two ranks that share the GPU, with NCCL.
    NcclTwoRanks,
}

impl CurveRanks {
    /// Returns the first component, such as `nccl`, of the names of `launch gpu-check` parts that
    /// train with these numbers of ranks.
    pub(super) fn part_group_name(self) -> &'static str {
        match self {
            CurveRanks::OneRank => "curves",
            CurveRanks::SeveralRanks => "ranks",
            CurveRanks::NcclOneRank => "nccl",
            CurveRanks::NcclTwoRanks => "nccl-2",
        }
    }

    /// Returns whether losses in the precision `name` are compared. fp16 is compared with one rank
    /// only, because its collectives do not differ from those of bf16.
    pub(super) fn compares_precision(self, name: &str) -> bool {
        self == CurveRanks::OneRank || name != "fp16"
    }

    /// Returns the approximate duration, in seconds, of a part of `launch gpu-check` that trains
    /// with these numbers of ranks.
    pub(super) fn expected_seconds(self) -> u64 {
        match self {
            CurveRanks::OneRank => 3,
            CurveRanks::SeveralRanks => 5,
            CurveRanks::NcclOneRank => 5,
            CurveRanks::NcclTwoRanks => 10,
        }
    }
}
