//! Mixtral: every layer has experts, and attends to a sliding window where `sliding_window` names one.
use super::{
    Family,
    config::Fields,
    decoder::{self, ExpertNames},
};
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    name: "mixtral",
    architecture: "MixtralForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = decoder::Numbers::read(&f)?;
        n.window = f.opt_size("sliding_window")?.map(|w| w as usize);
        n.sliding.fill(n.window.is_some());
        let names = ExpertNames { block: "block_sparse_moe", matrices: ["w1", "w3", "w2"] };
        n.read_experts(&f, f.size("num_local_experts")?, n.intermediate, names)?;
        f.only("router_jitter_noise", &[json!(0)])?;
        if let Some(e) = &mut n.experts {
            e.shape.normalise = true;
        }
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own = json!({
            "num_local_experts": spec.num_experts.unwrap_or(8),
            "num_experts_per_tok": spec.num_experts_per_tok.unwrap_or(2),
            "output_router_logits": false,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "sliding_window": null,
        });
        decoder::describe(spec, "mixtral", "MixtralForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};
