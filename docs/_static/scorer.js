// Sphinx's scores, but pages for a first training run come before all others.
var Scorer = {
  score: ([page, title, anchor, text, score]) =>
    score + ({ quickstart: 100, choose: 50 }[page] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
