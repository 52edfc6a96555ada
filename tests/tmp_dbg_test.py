import torch, whyformer, pytest
from tests.engine.test_again import *
def test_ag():
    from whyformer.engine import mode as M
    orig=M.Interception._count
    def cnt(self,row):
        try: return orig(self,row)
        except M.Strayed:
            n=self.number-1; c=self.facts.calls
            print("STRAY",n,len(c),row.name,c[max(0,n-3):n+4], "aside",self.aside)
            import traceback; traceback.print_stack(limit=12)
            raise
    M.Interception._count=cnt
    m,i=build("llama")
    try:
        whyformer.explain(m,i,"attnlrp",1,share=0.8,checkpoint=True)
    finally: M.Interception._count=orig
