//! Qwen 3 with experts: all layers, or those that `decoder_sparse_step` and `mlp_only_layers` leave; all slide or none.
use super::{
    Family,
    config::Fields,
    decoder::{self, ExpertNames},
};
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        let mut n = decoder::Numbers::read(&f)?;
        let bias = f.flag("attention_bias")?;
        (n.qkv_bias, n.o_bias, n.qk_norm) = (bias, bias, true);
        let window = f.opt_size("sliding_window")?;
        n.window = window.filter(|_| f.flag("use_sliding_window").is_ok_and(|on| on)).map(|w| w as usize);
        f.flag("use_sliding_window")?;
        n.sliding.fill(n.window.is_some());
        // Present in folders of the Hub, without effect in this architecture.
        f.get("max_window_layers");
        let names = ExpertNames { block: "mlp", matrices: ["gate_proj", "up_proj", "down_proj"] };
        let width = f.size("moe_intermediate_size")? as usize;
        n.read_experts(&f, experts(&f)?, width, names)?;
        let normalise = f.flag("norm_topk_prob")?;
        let step = f.opt_size("decoder_sparse_step")?.unwrap_or(1) as usize;
        let dense = mlp_only_layers(&f, n.layers)?;
        if let Some(e) = &mut n.experts {
            e.shape.normalise = normalise;
            let sparse =
                |(l, s): (usize, &mut bool)| *s = !dense.contains(&l) && (l + 1).is_multiple_of(step);
            e.sparse.iter_mut().enumerate().for_each(sparse);
            if !e.sparse.contains(&true) {
                return Err("`decoder_sparse_step` and `mlp_only_layers` leave no layer with experts; \
                            a model without any is Qwen3ForCausalLM"
                    .into());
            }
        }
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own = json!({
            "attention_bias": false,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": spec.moe_intermediate_size.unwrap_or(spec.intermediate_size),
            "norm_topk_prob": true,
            "num_experts": spec.num_experts.unwrap_or(8),
            "num_experts_per_tok": spec.num_experts_per_tok.unwrap_or(2),
            "output_router_logits": false,
            "router_aux_loss_coef": 0.001,
            "sliding_window": null,
            "use_sliding_window": false,
        });
        decoder::describe(spec, "qwen3_moe", "Qwen3MoeForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};

/// `num_experts`, which newer versions of transformers call `num_local_experts`.
fn experts(f: &Fields) -> Result<u32, String> {
    match (f.opt_size("num_experts")?, f.opt_size("num_local_experts")?) {
        (Some(a), Some(b)) if a != b => {
            Err("config.json: `num_experts` and `num_local_experts` differ; keep the one that is meant"
                .into())
        }
        (Some(n), _) | (None, Some(n)) => Ok(n),
        (None, None) => Err("config.json has no `num_experts`".into()),
    }
}

fn mlp_only_layers(f: &Fields, layers: usize) -> Result<Vec<usize>, String> {
    let Some(v) = f.get("mlp_only_layers") else { return Ok(Vec::new()) };
    let number = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&l| l < layers);
    let list = v.as_array().and_then(|l| l.iter().map(number).collect::<Option<Vec<usize>>>());
    list.ok_or_else(|| format!("config.json: `mlp_only_layers` is no list of layers below {layers}"))
}
