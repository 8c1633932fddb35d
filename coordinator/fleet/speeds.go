package fleet

import "waypost/gossip/ledger"

// class is what workers have in common that are compared in speed.
func (w *worker) class() ledger.Class {
	return ledger.Class{Engine: w.facts.Kind, Model: w.facts.Model, TensorParallel: len(w.facts.GPUUUIDs)}
}

// setModel takes the step model of the facts, or the prior of the class. It
// reports whether it is another one than before.
func (w *worker) setModel() (changed bool) {
	prior := ledger.PriorFor(w.class())
	model, stepTokens := prior.Model, prior.StepTokens
	if w.facts.StepModel != nil {
		model = *w.facts.StepModel
	}
	if w.facts.StepTokens > 0 {
		stepTokens = w.facts.StepTokens
	}
	changed = model != w.ownModel
	if changed {
		w.ownModel, w.model = model, model
	}
	w.stepTokens = stepTokens
	w.setSteps()
	return changed
}

// speedsDiffer reports whether the workers of a class may have other speeds than
// the class's prior: one of them learnt its own, or was equalised with one that
// has.
func (f *Fleet) speedsDiffer(class ledger.Class) bool {
	for _, w := range f.slots {
		if w != nil && (w.ownModel.Source == ledger.SourceLearnt || w.model != w.ownModel) && w.class() == class {
			return true
		}
	}
	return false
}

// equalise lets workers of one class count as equally fast that are within the
// dead band of their median: noise in what is learnt must not break good ties.
func (f *Fleet) equalise(class ledger.Class, nowMs float64, changes *Changes) {
	var workers []*worker
	var models []ledger.StepModel
	for _, w := range f.slots {
		if w != nil && w.class() == class {
			workers, models = append(workers, w), append(models, w.ownModel)
		}
	}
	for i, factor := range ledger.Equalise(models, nil) {
		w := workers[i]
		model := w.ownModel
		if factor != 1 {
			model = model.Scaled(factor)
		}
		if model == w.model {
			continue
		}
		w.model = model
		w.setSteps()
		w.rebase()
		w.refold()
		f.publish(w, nowMs, changes)
	}
}
